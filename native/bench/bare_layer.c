/*
 * The opponent of bench/layer.bench.ts: the libraries and system calls bare, one thread, one JSON
 * line out.
 *   bare_layer compress|decompress FILE BLOCK_BYTES ROUNDS   liblz4 over the file's blocks, in memory
 *   bare_layer seal OUT BYTES                                pwrite + SHA-256 in 4 MiB steps, fsync
 */
#include <fcntl.h>
#include <lz4.h>
#include <openssl/evp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Processor time: work of one thread, whoever else is running. */
static double cpu(void) {
  struct timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void die(const char *what) {
  perror(what);
  exit(1);
}

static char *read_file(const char *path, size_t *size) {
  int fd = open(path, O_RDONLY);
  struct stat info;
  if (fd < 0 || fstat(fd, &info) != 0) die(path);
  *size = (size_t)info.st_size;
  char *bytes = malloc(*size);
  if (bytes == NULL) die("malloc");
  for (size_t at = 0; at < *size;) {
    ssize_t got = read(fd, bytes + at, *size - at);
    if (got <= 0) die("read");
    at += (size_t)got;
  }
  close(fd);
  return bytes;
}

/* Compresses all blocks one after another into out; lengths per block. */
static size_t compress_all(const char *in, size_t size, int block, char *out, int *lengths) {
  size_t used = 0;
  const int bound = LZ4_compressBound(block);
  for (size_t at = 0, i = 0; at < size; at += (size_t)block, i++) {
    const int length = (int)(size - at < (size_t)block ? size - at : (size_t)block);
    lengths[i] = LZ4_compress_default(in + at, out + used, length, bound);
    if (lengths[i] <= 0) die("LZ4_compress_default");
    used += (size_t)lengths[i];
  }
  return used;
}

static void run_lz4(const char *mode, const char *path, int block, int rounds) {
  size_t size;
  char *in = read_file(path, &size);
  const size_t blocks = (size + (size_t)block - 1) / (size_t)block;
  char *out = malloc(blocks * (size_t)LZ4_compressBound(block));
  char *back = malloc(size);
  int *lengths = malloc(blocks * sizeof *lengths);
  if (out == NULL || back == NULL || lengths == NULL) die("malloc");
  memset(back, 1, size); /* touched before the clock runs */
  size_t used = compress_all(in, size, block, out, lengths);
  double best = 1e9;
  for (int round = 0; round < rounds; round++) {
    const double start = cpu();
    if (strcmp(mode, "compress") == 0) {
      used = compress_all(in, size, block, out, lengths);
    } else {
      size_t from = 0;
      for (size_t i = 0; i < blocks; i++) {
        const size_t at = i * (size_t)block;
        const int want = (int)(size - at < (size_t)block ? size - at : (size_t)block);
        if (LZ4_decompress_safe(out + from, back + at, lengths[i], want) != want) die("decompress");
        from += (size_t)lengths[i];
      }
    }
    const double took = cpu() - start;
    if (took < best) best = took;
  }
  if (strcmp(mode, "decompress") == 0 && memcmp(in, back, size) != 0) die("bytes differ");
  printf("{\"seconds\":%.6f,\"bytes\":%zu,\"stored\":%zu}\n", best, size, used);
}

static void run_seal(const char *path, uint64_t bytes) {
  const size_t step = 4 << 20;
  char *slab = malloc(step);
  if (slab == NULL) die("malloc");
  for (size_t i = 0; i < step; i++) slab[i] = (char)(i * 7 + (i >> 8));
  EVP_MD_CTX *digest = EVP_MD_CTX_new();
  const double start = now();
  int fd = open(path, O_WRONLY | O_CREAT | O_EXCL, 0644);
  if (fd < 0 || EVP_DigestInit_ex(digest, EVP_sha256(), NULL) != 1) die(path);
  for (uint64_t at = 0; at < bytes; at += step) {
    if (pwrite(fd, slab, step, (off_t)at) != (ssize_t)step) die("pwrite");
    EVP_DigestUpdate(digest, slab, step);
  }
  if (fsync(fd) != 0) die("fsync");
  unsigned char hash[32];
  EVP_DigestFinal_ex(digest, hash, NULL);
  const double took = now() - start;
  close(fd);
  unlink(path);
  printf("{\"seconds\":%.6f,\"bytes\":%llu,\"stored\":%u}\n", took, (unsigned long long)bytes,
         hash[0]);
}

int main(int argc, char **argv) {
  if (argc == 5 && (strcmp(argv[1], "compress") == 0 || strcmp(argv[1], "decompress") == 0)) {
    run_lz4(argv[1], argv[2], atoi(argv[3]), atoi(argv[4]));
    return 0;
  }
  if (argc == 4 && strcmp(argv[1], "seal") == 0) {
    run_seal(argv[2], strtoull(argv[3], NULL, 10));
    return 0;
  }
  fprintf(stderr, "usage: bare_layer compress|decompress FILE BLOCK ROUNDS | seal OUT BYTES\n");
  return 2;
}
