#include <array>

#include "binding/args.hpp"
#include "binding/register.hpp"
#include "core/coalesce.hpp"
#include "core/file_extents.hpp"
#include "core/pagemap.hpp"

namespace varve {
namespace {

// (fd, from bytes, pageCount, bits)
Napi::Value FileExtents(const Napi::CallbackInfo& info) {
  Args args(info);
  const int fd = args.Fd(0, "fd");
  const std::uint64_t from = args.Whole(1, "from");
  const std::uint64_t page_count = args.WholeAtMost(2, "pageCount", std::uint64_t{1} << 40);
  const auto bits = args.Bits(3, "bits");
  if (args.ok() && bits.size() != BitmapBytes(page_count)) {
    args.FailRange("bits must be one bit a page, in whole 64-bit words");
  }
  if (!args.ok()) return info.Env().Undefined();
  const Slice slice(RealSyscalls(), nullptr);
  const ScanOutcome outcome = ScanFileExtents(fd, from, page_count, bits, slice);
  Napi::Object result = Napi::Object::New(info.Env());
  Put(result, "next", static_cast<double>(outcome.next));
  Put(result, "done", outcome.done);
  Put(result, "error", static_cast<double>(outcome.error));
  return result;
}

// (pid, regions, pageCount, from page, mode 0 resident | 1 private | 2 zero, bits, forcePread 0 | 1)
Napi::Value Pagemap(const Napi::CallbackInfo& info) {
  Args args(info);
  const std::int32_t pid = args.Pid(0, "pid");
  const auto regions = args.Regions(1, "regions");
  const std::uint64_t page_count = args.Whole(2, "pageCount");
  const std::uint64_t from_page = args.Whole(3, "fromPage");
  const std::uint64_t mode = args.WholeAtMost(4, "mode", 2);
  const auto bits = args.Bits(5, "bits");
  const bool force_pread = args.WholeAtMost(6, "forcePread", 1) == 1;
  if (args.ok() && CheckLayout(bits, page_count, regions) != LayoutFault::kNone) {
    args.FailRange("bits, pageCount and regions do not fit together");
  }
  if (args.ok() && from_page > page_count) args.FailRange("fromPage is past pageCount");
  if (!args.ok()) return info.Env().Undefined();
  int error = 0;
  const UniqueFd pagemap = OpenPagemap(pid, error);
  PagemapOutcome outcome{from_page, error, false};
  PagemapMethod method = PagemapMethod::kPread;
  if (pagemap) {
    if (!force_pread) method = PreferredPagemapMethod(pagemap);
    constexpr std::array modes{PagemapMode::kResident, PagemapMode::kPrivate, PagemapMode::kZero};
    outcome = ScanPagemap(pagemap, regions, from_page, modes[mode], method, bits,
                          Slice(RealSyscalls(), nullptr));
  }
  Napi::Object result = Napi::Object::New(info.Env());
  Put(result, "next", static_cast<double>(outcome.next_page));
  Put(result, "done", outcome.done);
  Put(result, "error", static_cast<double>(outcome.error));
  Put(result, "scan", method == PagemapMethod::kScan);
  return result;
}

}  // namespace

void RegisterScan(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "fileExtents", FileExtents);
  Export(env, exports, "pagemapScan", Pagemap);
}

}  // namespace varve
