/*
 * What the bare system calls cost: the program that bench/capture.bench.ts compares Varve with.
 *
 *   bare_capture --pid P --ranges FILE [--mode readv|capture|freeze] [--threads N] [--out PATH]
 *                [--batch-bytes B] [--early-writeback] [--socket PATH]
 *
 * FILE holds pairs of little-endian 64-bit numbers: host address, length. Ranges are cut into
 * batches of at most B bytes and 1024 iovecs; threads take batches from a shared counter.
 *
 *   readv    one process_vm_readv pass over all ranges into one arena, touched beforehand.
 *   capture  each thread reads a batch into its own buffer, touched beforehand and used over and
 *            over, and pwrites it; one fsync at the end. --early-writeback also asks the kernel to
 *            start writing each batch at once (sync_file_range): the fsync has less to wait for.
 *   freeze   what a frozen VM has to wait for at the least: on one kept connection to the VMM's API
 *            socket (dialect e2b), pause it, have it save its state to PATH, ask for its mappings
 *            and its dirty bitmap (not parsed), then as readv, then resume it. answer_seconds is
 *            the part that was spent waiting for the VMM.
 *
 * Prints one JSON object. `seconds` is wall time from the moment all threads are ready to the end
 * of the last step; read_seconds and write_seconds are summed over threads. The checksum is the sum
 * of all 64-bit words, outside of the measured time. Exit status 1: a system call failed, as said.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { IOVECS_MAX = 1024, THREADS_MAX = 64 };

struct batch {
  size_t first; /* iovec */
  size_t count; /* iovecs */
  uint64_t offset; /* in the arena or the file */
  uint64_t bytes;
};

struct job {
  pid_t pid;
  int capture;
  int early_writeback;
  int out_fd;
  uint64_t batch_bytes;
  struct iovec *iovecs;
  struct batch *batches;
  size_t batch_count;
  uint8_t *arena; /* readv: everything; capture: one buffer a thread */
  atomic_size_t next;
  atomic_uint thread_index;
  pthread_barrier_t ready;
};

struct thread_times {
  double read_seconds;
  double write_seconds;
  uint64_t syscalls;
};

static void die(const char *what) {
  fprintf(stderr, "bare_capture: %s: %s\n", what, strerror(errno));
  exit(1);
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* One call almost always; the loop is for calls that come back short. */
static uint64_t read_batch(const struct job *job, const struct batch *batch, uint8_t *to) {
  struct iovec rest[IOVECS_MAX];
  struct iovec *remote = job->iovecs + batch->first;
  size_t count = batch->count;
  uint64_t done = 0;
  uint64_t syscalls = 0;
  for (;;) {
    struct iovec local = {to + done, batch->bytes - done};
    ssize_t got = process_vm_readv(job->pid, &local, 1, remote, count, 0);
    syscalls += 1;
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got <= 0) die("process_vm_readv");
    done += (uint64_t)got;
    if (done == batch->bytes) return syscalls;
    if (remote != rest) {
      memcpy(rest, remote, count * sizeof *rest);
      remote = rest;
    }
    size_t left = (size_t)got;
    while (left >= remote->iov_len) {
      left -= remote->iov_len;
      remote += 1;
      count -= 1;
    }
    remote->iov_base = (uint8_t *)remote->iov_base + left;
    remote->iov_len -= left;
    memmove(rest, remote, count * sizeof *rest);
    remote = rest;
  }
}

static uint64_t write_batch(const struct job *job, const struct batch *batch, const uint8_t *from) {
  uint64_t done = 0;
  uint64_t syscalls = 0;
  while (done < batch->bytes) {
    ssize_t put = pwrite(job->out_fd, from + done, batch->bytes - done,
                         (off_t)(batch->offset + done));
    syscalls += 1;
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) die("pwrite");
    done += (uint64_t)put;
  }
  if (job->early_writeback) {
    sync_file_range(job->out_fd, (off64_t)batch->offset, (off64_t)batch->bytes,
                    SYNC_FILE_RANGE_WRITE);
  }
  return syscalls;
}

static void *run(void *argument) {
  struct job *job = argument;
  struct thread_times *times = calloc(1, sizeof *times);
  if (times == NULL) die("calloc");
  uint8_t *buffer = job->arena + atomic_fetch_add(&job->thread_index, 1) * job->batch_bytes;
  pthread_barrier_wait(&job->ready);
  for (;;) {
    size_t index = atomic_fetch_add(&job->next, 1);
    if (index >= job->batch_count) return times;
    const struct batch *batch = &job->batches[index];
    double start = now();
    times->syscalls += read_batch(job, batch, job->capture ? buffer : job->arena + batch->offset);
    double read = now();
    times->read_seconds += read - start;
    if (job->capture) {
      times->syscalls += write_batch(job, batch, buffer);
      times->write_seconds += now() - read;
    }
  }
}

static uint8_t *touched(uint64_t bytes) {
  uint64_t huge = 2u << 20;
  uint8_t *memory = mmap(NULL, bytes + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                         -1, 0);
  if (memory == MAP_FAILED) die("mmap");
  memory += (huge - (uintptr_t)memory % huge) % huge;
  madvise(memory, bytes, MADV_HUGEPAGE);
  for (uint64_t i = 0; i < bytes; i += 4096) ((volatile uint8_t *)memory)[i] = 0;
  return memory;
}

/* Cuts the ranges into iovecs of at most batch_bytes, and groups these into batches. */
static uint64_t plan(struct job *job, const uint64_t *ranges, size_t range_count) {
  size_t most = range_count;
  for (size_t i = 0; i < range_count; ++i) most += ranges[i * 2 + 1] / job->batch_bytes + 1;
  job->iovecs = calloc(most, sizeof *job->iovecs);
  job->batches = calloc(most, sizeof *job->batches);
  if (job->iovecs == NULL || job->batches == NULL) die("calloc");
  uint64_t total = 0;
  size_t iovec_count = 0;
  struct batch batch = {0, 0, 0, 0};
  for (size_t i = 0; i < range_count; ++i) {
    uint64_t address = ranges[i * 2];
    uint64_t left = ranges[i * 2 + 1];
    while (left > 0) {
      if (batch.bytes == job->batch_bytes || batch.count == IOVECS_MAX) {
        job->batches[job->batch_count++] = batch;
        batch = (struct batch){iovec_count, 0, total, 0};
      }
      uint64_t room = job->batch_bytes - batch.bytes;
      uint64_t length = left < room ? left : room;
      job->iovecs[iovec_count++] = (struct iovec){(void *)(uintptr_t)address, length};
      batch.count += 1;
      batch.bytes += length;
      total += length;
      address += length;
      left -= length;
    }
  }
  if (batch.count > 0) job->batches[job->batch_count++] = batch;
  return total;
}

static uint64_t *load(const char *path, size_t *range_count) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) != 0) die(path);
  size_t size = (size_t)info.st_size;
  uint64_t *ranges = malloc(size + 8);
  if (ranges == NULL) die("malloc");
  for (size_t done = 0; done < size;) {
    ssize_t got = read(fd, (uint8_t *)ranges + done, size - done);
    if (got <= 0) die(path);
    done += (size_t)got;
  }
  close(fd);
  *range_count = size / 16;
  return ranges;
}

static uint64_t sum(const uint8_t *bytes, uint64_t size) {
  uint64_t total = 0;
  for (uint64_t i = 0; i + 8 <= size; i += 8) {
    uint64_t word;
    memcpy(&word, bytes + i, 8);
    total += word;
  }
  return total;
}

static uint64_t sum_file(int fd, uint64_t size) {
  if (size == 0) return 0;
  uint8_t *bytes = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
  if (bytes == MAP_FAILED) die("mmap of the output");
  uint64_t total = sum(bytes, size);
  munmap(bytes, size);
  return total;
}

static int connect_to(const char *path) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) die("the socket's path is too long");
  strcpy(address.sun_path, path);
  int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) != 0) die(path);
  return fd;
}

/* One request and its whole answer, by Content-Length or chunks; the body is dropped. */
static void ask(int fd, const char *method, const char *path, const char *body) {
  static char text[1 << 20];
  int length = snprintf(text, sizeof text,
                        "%s %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                        "Content-Length: %zu\r\n\r\n%s",
                        method, path, strlen(body), body);
  if (write(fd, text, (size_t)length) != length) die("write to the VMM");
  size_t have = 0;
  for (;;) {
    ssize_t n = read(fd, text + have, sizeof text - 1 - have);
    if (n <= 0) die("the VMM's answer");
    have += (size_t)n;
    text[have] = 0;
    char *head_end = strstr(text, "\r\n\r\n");
    if (head_end == NULL) continue;
    if (strncmp(text, "HTTP/1.1 2", 10) != 0) {
      fprintf(stderr, "%s %s: %.200s\n", method, path, text);
      exit(1);
    }
    size_t head = (size_t)(head_end + 4 - text);
    char *field = strcasestr(text, "\r\ncontent-length:");
    if (field != NULL && field < head_end) {
      if (have - head >= strtoull(field + 17, NULL, 10)) return;
    } else if (strcasestr(text, "\r\ntransfer-encoding: chunked") == NULL) {
      return;
    } else if (have >= 5 && memcmp(text + have - 5, "0\r\n\r\n", 5) == 0) {
      return;
    }
    if (have == sizeof text - 1) die("the answer is too long");
  }
}

static int usage(void) {
  fprintf(stderr, "usage: bare_capture --pid P --ranges FILE [--mode readv|capture] [--threads N]"
                  " [--out PATH] [--batch-bytes B] [--early-writeback]\n");
  return 2;
}

int main(int argc, char **argv) {
  struct job job = {.batch_bytes = 4u << 20, .out_fd = -1};
  const char *ranges_path = NULL;
  const char *out_path = NULL;
  const char *socket_path = NULL;
  int freeze = 0;
  unsigned thread_count = 1;
  for (int i = 1; i < argc; ++i) {
    const char *name = argv[i];
    if (strcmp(name, "--early-writeback") == 0) {
      job.early_writeback = 1;
      continue;
    }
    if (i + 1 >= argc) return usage();
    const char *value = argv[++i];
    if (strcmp(name, "--pid") == 0) job.pid = atoi(value);
    else if (strcmp(name, "--ranges") == 0) ranges_path = value;
    else if (strcmp(name, "--socket") == 0) socket_path = value;
    else if (strcmp(name, "--mode") == 0) {
      job.capture = strcmp(value, "capture") == 0;
      freeze = strcmp(value, "freeze") == 0;
    }
    else if (strcmp(name, "--threads") == 0) thread_count = (unsigned)atoi(value);
    else if (strcmp(name, "--out") == 0) out_path = value;
    else if (strcmp(name, "--batch-bytes") == 0) job.batch_bytes = strtoull(value, NULL, 10);
    else return usage();
  }
  if (job.pid <= 0 || ranges_path == NULL || thread_count < 1 || thread_count > THREADS_MAX ||
      job.batch_bytes < 4096 || ((job.capture || freeze) && out_path == NULL) ||
      (freeze && socket_path == NULL)) {
    return usage();
  }

  size_t range_count = 0;
  uint64_t *ranges = load(ranges_path, &range_count);
  uint64_t total = plan(&job, ranges, range_count);
  if (job.capture) {
    job.out_fd = open(out_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (job.out_fd < 0) die(out_path);
  }
  job.arena = touched(job.capture ? job.batch_bytes * thread_count : total + 1);

  pthread_t threads[THREADS_MAX];
  pthread_barrier_init(&job.ready, NULL, thread_count + 1);
  for (unsigned i = 0; i < thread_count; ++i) {
    errno = pthread_create(&threads[i], NULL, run, &job);
    if (errno != 0) die("pthread_create");
  }
  int vmm = -1;
  char save[4096];
  if (freeze) {
    vmm = connect_to(socket_path);
    ask(vmm, "GET", "/", "");
    snprintf(save, sizeof save, "{\"snapshot_type\":\"Diff\",\"snapshot_path\":\"%s\"}", out_path);
  }
  double start = now();
  if (freeze) {
    ask(vmm, "PATCH", "/vm", "{\"state\":\"Paused\"}");
    ask(vmm, "PUT", "/snapshot/create", save);
    ask(vmm, "GET", "/memory/mappings", "");
    ask(vmm, "GET", "/memory/dirty", "");
  }
  double asked = now();
  pthread_barrier_wait(&job.ready);
  if (!freeze) start = asked = now();
  struct thread_times all = {0, 0, 0};
  for (unsigned i = 0; i < thread_count; ++i) {
    void *result = NULL;
    pthread_join(threads[i], &result);
    struct thread_times *times = result;
    all.read_seconds += times->read_seconds;
    all.write_seconds += times->write_seconds;
    all.syscalls += times->syscalls;
    free(times);
  }
  double copied = now();
  if (job.capture && fsync(job.out_fd) != 0) die("fsync");
  if (freeze) ask(vmm, "PATCH", "/vm", "{\"state\":\"Resumed\"}");
  double end = now();
  double answers = freeze ? asked - start + (end - copied) : 0.0;
  uint64_t checksum = job.capture ? sum_file(job.out_fd, total) : sum(job.arena, total);
  printf("{\"mode\":\"%s\",\"seconds\":%.6f,\"bytes\":%" PRIu64 ",\"checksum\":\"%016" PRIx64
         "\",\"threads\":%u,\"batches\":%zu,\"syscalls\":%" PRIu64
         ",\"read_seconds\":%.6f,\"write_seconds\":%.6f,\"copy_seconds\":%.6f,"
         "\"fsync_seconds\":%.6f,\"answer_seconds\":%.6f}\n",
         job.capture ? "capture" : (freeze ? "freeze" : "readv"), end - start, total, checksum, thread_count,
         job.batch_count, all.syscalls, all.read_seconds, all.write_seconds, copied - asked,
         job.capture ? end - copied : 0.0, answers);
  free(ranges);
  return 0;
}
