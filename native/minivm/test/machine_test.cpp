// Tests of the guest core without Node: `machine_test thread` or `machine_test kvm`.
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <memory>

#include "minivm/machine.hpp"

namespace {

using minivm::Bitmap;
using minivm::kPageBytes;
using minivm::Machine;
using minivm::MachineOptions;
using minivm::Program;
using minivm::ProgramPlaced;
using Set = minivm::Machine::Set;

constexpr std::uint64_t kLowPages = 4096;
constexpr std::uint64_t kHighPages = 256;
constexpr std::uint64_t kAllPages = kLowPages + kHighPages;

int failures = 0;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::printf("  FAILED %s:%d: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                          \
    }                                                                      \
  } while (false)

void Must(const minivm::Failure& failure, int line) {
  if (!failure) return;
  std::printf("  FAILED line %d: %s\n", line, failure->c_str());
  ++failures;
}
#define MUST(expression) Must((expression), __LINE__)

MachineOptions Options(minivm::BackendKind backend) {
  MachineOptions options;
  options.regions = {{0, kLowPages * kPageBytes}, {1ULL << 32, kHighPages * kPageBytes}};
  options.backend = backend;
  options.track = true;
  return options;
}

Program List(std::vector<std::uint64_t> pages) {
  Program program;
  program.command = minivm::kRandom;
  program.use_list = true;
  program.list = std::move(pages);
  program.value = 7;
  return program;
}

Program Range(minivm::Command command, std::uint64_t first, std::uint64_t count) {
  Program program;
  program.command = command;
  program.first = first;
  program.count = count;
  program.value = 0xdeadbeef;
  return program;
}

std::uint64_t Run(Machine& machine, const Program& program) {
  ProgramPlaced placed;
  MUST(machine.SetProgram(program, placed));
  const std::uint64_t start = minivm::MonotonicNs();
  while (!machine.ReadCounters().idle && machine.crash().empty()) {
    const timespec nap{0, 200000};
    nanosleep(&nap, nullptr);
    if (minivm::MonotonicNs() - start > 60'000'000'000ULL) {
      std::printf("  FAILED: the program did not end\n");
      ++failures;
      break;
    }
  }
  if (!machine.crash().empty()) {
    std::printf("  FAILED: %s\n", machine.crash().c_str());
    ++failures;
  }
  return minivm::MonotonicNs() - start;
}

std::vector<std::uint64_t> Pages(Machine& machine, Set set) {
  std::vector<Bitmap> sets;
  MUST(machine.Collect(set, sets));
  std::vector<std::uint64_t> pages;
  std::uint64_t base = 0;
  for (std::size_t i = 0; i < sets.size(); ++i) {
    const std::uint64_t count = machine.memory().regions()[i]->pages;
    minivm::ForEachRun(sets[i], count, [&](std::uint64_t first, std::uint64_t run) {
      for (std::uint64_t page = first; page < first + run; ++page) pages.push_back(base + page);
      return true;
    });
    base += count;
  }
  return pages;
}

std::vector<std::uint64_t> Hashes(Machine& machine) {
  std::vector<std::uint64_t> hashes(kAllPages);
  MUST(machine.HashPages(0, kAllPages, hashes.data()));
  return hashes;
}

using PageList = std::vector<std::uint64_t>;

void TestDirtySets(minivm::BackendKind backend) {
  Machine machine;
  MUST(machine.Create(Options(backend)));
  machine.Resume();
  PageList guest;
  for (std::uint64_t page = 3; page < kLowPages; page += 37) guest.push_back(page);
  const std::uint64_t ns = Run(machine, List(guest));
  std::printf("  %zu whole pages written by the guest in %.1f ms\n", guest.size(),
              static_cast<double>(ns) / 1e6);
  CHECK(Pages(machine, Set::kGuestLog) == guest);
  CHECK(Pages(machine, Set::kVmmLog).empty());
  CHECK(Pages(machine, Set::kDirty) == guest);

  const std::uint8_t byte = 1;
  MUST(machine.DeviceWrite(5 * kPageBytes, &byte, 1));
  MUST(machine.DeviceWrite((kLowPages + 1) * kPageBytes, &byte, 1));
  CHECK(Pages(machine, Set::kVmmLog) == (PageList{5, kLowPages + 1}));

  MUST(machine.ResetDirty());
  CHECK(Pages(machine, Set::kDirty).empty());
  Run(machine, Range(minivm::kRead, 0, kLowPages));
  // KVM maps a page that the host already has writable as writable on a guest's read, and logs it
  // as dirty then: page 5, which the device wrote. No other page may be named.
  const PageList after_reads = Pages(machine, Set::kDirty);
  CHECK(after_reads.empty() ||
        (backend == minivm::BackendKind::kKvm && after_reads == PageList{5}));
  MUST(machine.ResetDirty());
  CHECK(Pages(machine, Set::kResident).size() == kLowPages + 1);
  Run(machine, Range(minivm::kFill, 60, 10));
  CHECK(Pages(machine, Set::kDirty) == (PageList{60, 61, 62, 63, 64, 65, 66, 67, 68, 69}));
  std::uint32_t word = 0;
  MUST(machine.ReadBytes(69 * kPageBytes + 4092, reinterpret_cast<std::uint8_t*>(&word), 4));
  CHECK(word == 0xdeadbeef);
}

void TestSameBytes(minivm::BackendKind backend) {
  Machine one;
  Machine two;
  MUST(one.Create(Options(backend)));
  MUST(two.Create(Options(minivm::BackendKind::kThread)));
  for (Machine* machine : {&one, &two}) {
    machine->Resume();
    Run(*machine, List({9, 1, 4000, kLowPages + 3, 77}));
    Program some = Range(minivm::kRandom, 100, 50);
    some.words = 5;
    Run(*machine, some);
  }
  CHECK(Hashes(one) == Hashes(two));
  std::uint8_t page[kPageBytes];
  MUST(one.ReadBytes(4000 * kPageBytes, page, kPageBytes));
  std::uint32_t words[2];
  std::memcpy(words, page, 8);
  CHECK(words[0] == minivm::PatternWord(7, 0, 4000));
  CHECK(words[1] == 4000);
}

void TestPause(minivm::BackendKind backend) {
  Machine machine;
  MUST(machine.Create(Options(backend)));
  machine.Resume();
  ProgramPlaced placed;
  Program loop = Range(minivm::kRandom, 0, kLowPages);
  loop.loop = true;
  loop.words = 8;
  MUST(machine.SetProgram(loop, placed));
  std::uint64_t total = 0;
  std::uint64_t longest = 0;
  for (int round = 0; round < 30; ++round) {
    const std::uint64_t from = minivm::MonotonicNs();
    machine.Pause();
    const std::uint64_t took = minivm::MonotonicNs() - from;
    if (took > longest) longest = took;
    const auto before = Hashes(machine);
    const minivm::Counters counters = machine.ReadCounters();
    const timespec nap{0, 2000000};
    nanosleep(&nap, nullptr);
    CHECK(machine.ReadCounters().counter == counters.counter);
    CHECK(Hashes(machine) == before);
    total = counters.pages_total;
    machine.Resume();
    nanosleep(&nap, nullptr);
  }
  CHECK(total > 0);
  std::printf("  30 pauses, longest %.2f ms, %llu pages touched meanwhile\n",
              static_cast<double>(longest) / 1e6, static_cast<unsigned long long>(total));
  machine.Pause();
  machine.ResetGap();
  machine.Resume();
  MUST(machine.SetProgram(Program{}, placed));
  const timespec tick{0, 20000000};
  nanosleep(&tick, nullptr);
  machine.Pause();
  const timespec freeze{0, 300000000};
  nanosleep(&freeze, nullptr);
  machine.Resume();
  nanosleep(&tick, nullptr);
  const double gap_ms = static_cast<double>(machine.ReadCounters().max_gap_ns) / 1e6;
  std::printf("  frozen 300 ms, the guest's own clock says %.1f ms\n", gap_ms);
  CHECK(gap_ms > 299 && gap_ms < 900);
}

void TestRestore(minivm::BackendKind backend) {
  const std::string path = "/tmp/minivm-test.mem";
  unlink(path.c_str());
  MachineOptions options = Options(backend);
  PageList expected;
  std::uint64_t counter = 0;
  {
    Machine machine;
    MUST(machine.Create(options));
    machine.Resume();
    Run(machine, List({1, 2, 3, 900, kLowPages + 9}));
    ProgramPlaced placed;
    Program loop = List({10, 20, 30, 40});
    loop.loop = true;
    MUST(machine.SetProgram(loop, placed));
    while (machine.ReadCounters().passes < 3 && machine.crash().empty()) {
    }
    machine.Pause();
    MUST(machine.memory().WriteFile(path, nullptr));
    MUST(machine.SaveVcpu(options.saved_vcpu));
    machine.SaveWindow(options.saved_window);
    expected = Hashes(machine);
    counter = machine.ReadCounters().counter;
  }
  options.backing = minivm::Backing::kFile;
  options.memory_path = path;
  {
    Machine machine;
    MUST(machine.Create(options));
    CHECK(Hashes(machine) == expected);
    CHECK(machine.ReadCounters().counter == counter);
    CHECK(Pages(machine, Set::kDirty).empty());
    machine.Resume();
    const std::uint32_t passes = machine.ReadCounters().passes;
    while (machine.ReadCounters().passes < passes + 3 && machine.crash().empty()) {
    }
    machine.Pause();
    CHECK(machine.crash().empty());
    CHECK(machine.ReadCounters().counter > counter);
    CHECK(Pages(machine, Set::kDirty) == (PageList{10, 20, 30, 40}));
    // A removed page of a file-backed guest reads zero, not the file's bytes.
    MUST(machine.Remove(900, 1, false));
    std::vector<std::uint8_t> page(kPageBytes, 1);
    MUST(machine.ReadBytes(900 * kPageBytes, page.data(), kPageBytes));
    CHECK(page == std::vector<std::uint8_t>(kPageBytes, 0));
  }
  truncate(path.c_str(), static_cast<off_t>((kAllPages - 1) * kPageBytes));
  {
    Machine machine;
    CHECK(machine.Create(options).has_value());
  }
  unlink(path.c_str());
  options.saved_window[0x1c] = 9;
  options.backing = minivm::Backing::kAnonymous;
  {
    Machine machine;
    CHECK(machine.Create(options).has_value());
  }
}

void TestRemovalAndEpochs(minivm::BackendKind backend) {
  Machine machine;
  MUST(machine.Create(Options(backend)));
  machine.Resume();
  Run(machine, List({1, 2, 3, 4}));
  MUST(machine.Remove(2, 2, false));
  CHECK(Pages(machine, Set::kRemoved) == (PageList{2, 3}));
  Run(machine, List({3}));
  CHECK(Pages(machine, Set::kRemoved) == (PageList{2}));

  machine.Pause();
  MUST(machine.Epoch(minivm::EpochAction::kBegin));
  CHECK(Pages(machine, Set::kDirty) == (PageList{1, 2, 3, 4}));
  CHECK(Pages(machine, Set::kRemoved) == (PageList{2}));
  machine.Resume();
  Run(machine, List({2, 50}));
  CHECK(Pages(machine, Set::kDirty) == (PageList{1, 2, 3, 4}));
  MUST(machine.Epoch(minivm::EpochAction::kAbort));
  CHECK(Pages(machine, Set::kDirty) == (PageList{1, 2, 3, 4, 50}));
  CHECK(Pages(machine, Set::kRemoved).empty());
  machine.Pause();
  MUST(machine.Epoch(minivm::EpochAction::kBegin));
  CHECK(machine.Epoch(minivm::EpochAction::kBegin).has_value());
  machine.Resume();
  Run(machine, List({60}));
  MUST(machine.Epoch(minivm::EpochAction::kCommit));
  CHECK(machine.Epoch(minivm::EpochAction::kCommit).has_value());
  CHECK(Pages(machine, Set::kDirty) == (PageList{60}));
  CHECK(machine.epoch_number() == 1);
}

void TestRegions(minivm::BackendKind backend) {
  Machine machine;
  MUST(machine.Create(Options(backend)));
  machine.Resume();
  MUST(machine.AddRegion({64ULL << 20, 64 * kPageBytes}));
  Run(machine, List({kAllPages + 5}));
  CHECK(Pages(machine, Set::kDirty) == (PageList{kAllPages + 5}));
  MUST(machine.DropRegion());
  CHECK(Pages(machine, Set::kDirty).empty());
  Run(machine, List({8}));
  CHECK(Pages(machine, Set::kDirty) == (PageList{8}));
}

void TestPace(minivm::BackendKind backend) {
  Machine machine;
  MUST(machine.Create(Options(backend)));
  machine.Resume();
  Program paced = Range(minivm::kRandom, 0, 100);
  paced.words = 2;
  paced.pages_per_second = 500;
  const double ms = static_cast<double>(Run(machine, paced)) / 1e6;
  std::printf("  100 pages at 500/s took %.0f ms\n", ms);
  CHECK(ms > 190);
}

}  // namespace

int main(int argc, char** argv) {
  const bool kvm = argc > 1 && std::strcmp(argv[1], "kvm") == 0;
  const auto backend = kvm ? minivm::BackendKind::kKvm : minivm::BackendKind::kThread;
  std::setvbuf(stdout, nullptr, _IONBF, 0);
  if (kvm) {
    const std::string why = minivm::ProbeKvm();
    std::printf("probe: %s\n", why.empty() ? "KVM runs" : why.c_str());
    if (!why.empty()) return 1;
  }
  const struct {
    const char* name;
    void (*run)(minivm::BackendKind);
  } tests[] = {
      {"dirty sets are exact", TestDirtySets},
      {"both guests write the same bytes", TestSameBytes},
      {"pause stops the guest", TestPause},
      {"a saved VM runs on in a second one", TestRestore},
      {"removal and epochs", TestRemovalAndEpochs},
      {"regions come and go", TestRegions},
      {"a paced program keeps its pace", TestPace},
  };
  for (const auto& test : tests) {
    const int before = failures;
    std::printf("%s: %s\n", kvm ? "kvm" : "thread", test.name);
    test.run(backend);
    std::printf("%s\n", failures == before ? "  ok" : "  NOT OK");
  }
  std::printf(failures == 0 ? "ALL OK\n" : "FAILURES: %d\n", failures);
  return failures == 0 ? 0 : 1;
}
