/*
 * A guest without a kernel, for real VMMs: in rounds it fills pages with a pattern that says which
 * page and which round, prints a line per round to the serial port, and waits, watching its own time
 * stamp counter all the while. It runs in user mode with I/O privilege on memory
 * mapped to itself (start.S), takes no interrupt and has no device but the serial port and, for its
 * clock, the timer.
 *
 * What it is told, on the kernel command line, as `varve.<name>=<number>`, decimal or 0x…:
 *   pages   pages that a round writes; 0 leaves memory alone (512)
 *   rounds  rounds that write; later ones only count; 0 is without end (0)
 *   first   rounds start with one that writes so many pages (0)
 *   pause   milliseconds between rounds (20)
 *   seed    which pages (1)
 *   range   <start>-<end>, physical addresses of pages to choose from, end exclusive; may be given up
 *           to 8 times; all of memory above the guest's own where it is not
 *
 * What it prints: `varve guest ticks_per_ms=<n> pages=<n>` and then lines of
 * `round=<n> wrote=<n> bad=<n> longest_us=<n>`: the round, pages written, pages found with anything
 * but what an earlier round left, and the longest step of its counter since the line before, in
 * microseconds: frozen time as the guest sees it.
 */
#include <stdint.h>

#define PAGE 4096ull
#define LARGE (2ull << 20)
#define GIB (1ull << 30)
/* Page directories are made between the image and this; one maps a GiB. */
#define OWN_END 0x400000ull
#define RANGES 8
#define TIMER_HZ 1193182ull

extern uint64_t directory_pointers[512], first_directory[512];
extern char image_end[];

struct range {
  uint64_t start, end;
};

struct settings {
  uint64_t pages, rounds, first, pause, seed;
  struct range ranges[RANGES];
  unsigned count;
};

static inline void out8(uint16_t port, uint8_t value) {
  __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline uint8_t in8(uint16_t port) {
  uint8_t value;
  __asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
  return value;
}

static inline uint64_t ticks(void) {
  uint32_t low, high;
  __asm__ volatile("rdtsc" : "=a"(low), "=d"(high));
  return (uint64_t)high << 32 | low;
}

static void print(const char *text) {
  for (; *text != 0; ++text) out8(0x3f8, (uint8_t)*text);
}

static void print_number(const char *name, uint64_t value) {
  char digits[21];
  char *at = digits + sizeof digits - 1;
  *at = 0;
  do *--at = (char)('0' + value % 10);
  while ((value /= 10) != 0);
  print(name);
  print(at);
}

/* A number and where it ends. */
static const char *number(const char *text, uint64_t *value) {
  unsigned base = 10;
  if (text[0] == '0' && text[1] == 'x') {
    base = 16;
    text += 2;
  }
  for (*value = 0;; ++text) {
    char c = *text;
    unsigned digit = c >= '0' && c <= '9' ? (unsigned)(c - '0')
                     : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a' + 10)
                                            : 99;
    if (digit >= base) return text;
    *value = *value * base + digit;
  }
}

/* What follows `name` where the text starts with it, else 0. */
static const char *after(const char *text, const char *name) {
  while (*name != 0)
    if (*text++ != *name++) return 0;
  return text;
}

static void read_settings(struct settings *s, const char *text) {
  for (; *text != 0; ++text) {
    const char *name = after(text, "varve.");
    const char *value;
    if (name == 0) continue;
    if ((value = after(name, "pages=")) != 0) number(value, &s->pages);
    if ((value = after(name, "rounds=")) != 0) number(value, &s->rounds);
    if ((value = after(name, "first=")) != 0) number(value, &s->first);
    if ((value = after(name, "pause=")) != 0) number(value, &s->pause);
    if ((value = after(name, "seed=")) != 0) number(value, &s->seed);
    if ((value = after(name, "range=")) != 0 && s->count < RANGES) {
      struct range *range = &s->ranges[s->count++];
      value = number(value, &range->start);
      number(*value == '-' ? value + 1 : value, &range->end);
    }
  }
}

/* Maps memory to itself in large pages, a directory per GiB, as far as there is room for them. */
static void map_up_to(uint64_t end) {
  uint64_t *directory = first_directory;
  uint64_t *room = (uint64_t *)(((uint64_t)image_end + PAGE - 1) & ~(PAGE - 1));
  for (uint64_t gib = 0; gib < 512 && gib * GIB < end && (uint64_t)room < OWN_END; ++gib) {
    for (uint64_t i = 0; i < 512; ++i) directory[i] = (gib * GIB + i * LARGE) | 0x87;
    directory_pointers[gib] = (uint64_t)directory | 7;
    directory = room;
    room += 512;
  }
}

/* Usable memory as the boot parameters list it: a count at 0x1e8, rows of 20 bytes at 0x2d0. */
static uint64_t memory_map(const uint8_t *zero_page, struct range *ranges, unsigned *count) {
  uint64_t highest = 0;
  for (unsigned i = 0; i < zero_page[0x1e8]; ++i) {
    const uint8_t *row = zero_page + 0x2d0 + 20 * i;
    uint64_t start, size;
    uint32_t type;
    __builtin_memcpy(&start, row, 8);
    __builtin_memcpy(&size, row + 8, 8);
    __builtin_memcpy(&type, row + 16, 4);
    if (type != 1 || start + size <= OWN_END || *count >= RANGES) continue;
    if (start < OWN_END) size -= OWN_END - start, start = OWN_END;
    ranges[(*count)++] = (struct range){start, start + size};
    if (start + size > highest) highest = start + size;
  }
  return highest;
}

/* From the timer's second channel, which counts down while its gate is open. */
static uint64_t ticks_per_ms(void) {
  out8(0x61, (uint8_t)((in8(0x61) & ~2) | 1));
  out8(0x43, 0xb0);
  out8(0x42, 0xff);
  out8(0x42, 0xff);
  uint64_t start = ticks();
  for (;;) {
    out8(0x43, 0x80);
    uint64_t left = in8(0x42);
    left |= (uint64_t)in8(0x42) << 8;
    uint64_t now = ticks();
    uint64_t passed = 0xffff - left;
    if (passed > TIMER_HZ / 50) return (now - start) * TIMER_HZ / passed / 1000;
    if (now - start > 1ull << 34) return 1000000; /* A timer that stands still. */
  }
}

static uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

static uint64_t page_address(const struct settings *s, uint64_t index) {
  for (unsigned i = 0; i < s->count; ++i) {
    uint64_t pages = (s->ranges[i].end - s->ranges[i].start) / PAGE;
    if (index < pages) return s->ranges[i].start + index * PAGE;
    index -= pages;
  }
  return s->ranges[0].start;
}

/* Whether a page has what no round up to `round` could have left: neither zeroes nor one pattern. */
static int is_bad(const uint64_t *page, uint64_t address, uint64_t round) {
  uint64_t word = page[0];
  if (word != page[255] || word != page[511]) return 1;
  return word != 0 && ((word >> 40) > round || (word & 0xffffffffffull) != address / PAGE);
}

static void fill(uint64_t address, uint64_t round) {
  void *at = (void *)address;
  uint64_t count = PAGE / 8;
  uint64_t word = round << 40 | address / PAGE;
  __asm__ volatile("rep stosq" : "+D"(at), "+c"(count) : "a"(word) : "memory");
}

/* The counter when it was last looked at, and its longest step since `longest` was reset. */
static struct {
  uint64_t last, longest;
} seen;

static uint64_t look(void) {
  uint64_t now = ticks();
  if (seen.last != 0 && now - seen.last > seen.longest) seen.longest = now - seen.last;
  return seen.last = now;
}

static void wait(uint64_t length) {
  uint64_t start = look();
  while (look() - start < length) __asm__ volatile("pause");
}

static void run(const struct settings *s, uint64_t total, uint64_t per_ms) {
  for (uint64_t round = 1;; ++round) {
    uint64_t bad = 0;
    uint64_t count = round == 1 && s->first > 0 ? s->first : s->pages;
    if (s->rounds != 0 && round > s->rounds) count = 0;
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t index = mixed(mixed(s->seed ^ round << 32) + i) % total;
      uint64_t address = page_address(s, index);
      bad += (uint64_t)is_bad((const uint64_t *)address, address, round);
      fill(address, round);
      look();
    }
    wait(s->pause * per_ms);
    uint64_t longest = seen.longest;
    seen.longest = 0;
    print_number("round=", round);
    print_number(" wrote=", count);
    print_number(" bad=", bad);
    print_number(" longest_us=", longest * 1000 / per_ms);
    print("\n");
  }
}

void main(const uint8_t *zero_page) {
  struct settings s = {.pages = 512, .pause = 20, .seed = 1};
  struct range all[RANGES];
  unsigned count = 0;
  uint64_t highest = memory_map(zero_page, all, &count);
  uint32_t text;
  __builtin_memcpy(&text, zero_page + 0x228, 4);
  read_settings(&s, (const char *)(uint64_t)text);
  map_up_to(highest);
  if (s.count == 0) {
    for (; s.count < count; ++s.count) s.ranges[s.count] = all[s.count];
  }
  uint64_t total = 0;
  for (unsigned i = 0; i < s.count; ++i) total += (s.ranges[i].end - s.ranges[i].start) / PAGE;
  uint64_t per_ms = ticks_per_ms();
  print_number("varve guest ticks_per_ms=", per_ms);
  print_number(" pages=", total);
  print("\n");
  if (total == 0) s.pages = s.first = 0;
  run(&s, total == 0 ? 1 : total, per_ms);
}
