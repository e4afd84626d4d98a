#include "core/thread_runs.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <span>
#include <string_view>

#include "core/unique_fd.hpp"

namespace varve {
namespace {

// A status file is below 2 KiB, but for hosts with very many processors and memory nodes.
using Text = std::array<char, 16 * 1024>;

// The file `name` of a thread, or an empty text and `error`.
std::string_view ReadOf(pid_t pid, pid_t tid, const char* name, Text& text, int& error) noexcept {
  std::array<char, 64> path;
  std::snprintf(path.data(), path.size(), "/proc/%d/task/%d/%s", static_cast<int>(pid),
                static_cast<int>(tid), name);
  const UniqueFd fd(::open(path.data(), O_RDONLY | O_CLOEXEC));
  if (!fd) {
    error = errno;
    return {};
  }
  ssize_t got = 0;
  do {
    got = ::read(fd.get(), text.data(), text.size());
  } while (got < 0 && errno == EINTR);
  error = got < 0 ? errno : (got == 0 ? ENODATA : 0);
  return {text.data(), got < 0 ? 0 : static_cast<std::size_t>(got)};
}

// The decimal number that `text` starts with, after blanks; takes it off.
bool TakeNumber(std::string_view& text, std::uint64_t& out) noexcept {
  const std::size_t start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return false;
  text.remove_prefix(start);
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), out);
  if (parsed.ec != std::errc{}) return false;
  text.remove_prefix(static_cast<std::size_t>(parsed.ptr - text.data()));
  return true;
}

bool NumberAfter(std::string_view text, std::string_view key, std::uint64_t& out) noexcept {
  const std::size_t at = text.find(key);
  if (at == std::string_view::npos) return false;
  text.remove_prefix(at + key.size());
  return TakeNumber(text, out);
}

// The state of a stat line follows the last closing parenthesis: a name may hold any others.
bool IsAsleep(std::string_view stat) noexcept {
  const std::size_t name_end = stat.rfind(')');
  return name_end != std::string_view::npos && stat.substr(name_end).starts_with(") S ");
}

// "<ns on processors> <ns waited for one> <turns>"; all zero where the kernel does not count.
int ParseSchedstat(std::string_view line, ThreadRuns& out) noexcept {
  std::uint64_t waited = 0;
  const bool good =
      TakeNumber(line, out.ran_ns) && TakeNumber(line, waited) && TakeNumber(line, out.turns);
  return good && out.turns > 0 ? 0 : ENODATA;
}

int ParseStatus(std::string_view text, ThreadRuns& out) noexcept {
  std::uint64_t voluntary = 0;
  std::uint64_t forced = 0;
  const bool good = NumberAfter(text, "\nvoluntary_ctxt_switches:", voluntary) &&
                    NumberAfter(text, "\nnonvoluntary_ctxt_switches:", forced);
  out.turns = voluntary + forced;
  return good ? 0 : ENODATA;
}

}  // namespace

ThreadRuns ReadThreadRuns(pid_t pid, pid_t tid, RunsSource source, bool with_state) noexcept {
  ThreadRuns runs;
  Text text;
  if (with_state || source == RunsSource::kSwitches) {
    const std::string_view stat = ReadOf(pid, tid, "stat", text, runs.error);
    runs.asleep = IsAsleep(stat);
  }
  if (runs.error == 0) {
    const bool counts = source == RunsSource::kSchedstat;
    const std::string_view read =
        ReadOf(pid, tid, counts ? "schedstat" : "status", text, runs.error);
    if (runs.error == 0) {
      runs.error = counts ? ParseSchedstat(read, runs) : ParseStatus(read, runs);
    }
  }
  return runs;
}

}  // namespace varve
