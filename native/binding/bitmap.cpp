#include "core/bitmap.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "binding/args.hpp"
#include "binding/register.hpp"
#include "core/coalesce.hpp"

namespace varve {
namespace {

Napi::Value Count(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto bits = args.Bits(0, "bits");
  if (!args.ok()) return info.Env().Undefined();
  return Napi::Number::New(info.Env(), static_cast<double>(BitmapCount(bits)));
}

template <void (*kOperation)(Bits, ConstBits) noexcept>
Napi::Value Combine(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto into = args.Bits(0, "into");
  const auto from = args.Bits(1, "from");
  if (args.ok() && into.size() != from.size()) args.FailRange("bitmaps differ in length");
  if (args.ok()) kOperation(into, from);
  return info.Env().Undefined();
}

template <void (*kOperation)(Bits, std::uint64_t, std::uint64_t) noexcept>
Napi::Value Range(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto bits = args.Bits(0, "bits");
  const std::uint64_t first = args.Whole(1, "firstPage");
  const std::uint64_t count = args.Whole(2, "pageCount");
  if (args.ok() && first + count > bits.size() * 8) args.FailRange("range is outside of bits");
  if (args.ok()) kOperation(bits, first, count);
  return info.Env().Undefined();
}

const char* Describe(LayoutFault fault) {
  switch (fault) {
    case LayoutFault::kBitmapSize:
      return "bits must be one bit a page, in whole 64-bit words";
    case LayoutFault::kTailBits:
      return "bits has a bit set past pageCount";
    case LayoutFault::kRegions:
      return "regions must be ascending, adjacent, of whole pages, and pageCount in total";
    case LayoutFault::kNone:
      break;
  }
  return "";
}

// (bits, pageCount, regions, fromPage, batchBytes, maxRows, maxSegmentBytes, joinGapPages)
Napi::Value Coalesce(const Napi::CallbackInfo& info) {
  Args args(info);
  const auto bits = args.Bits(0, "bits");
  const std::uint64_t page_count = args.Whole(1, "pageCount");
  const auto regions = args.Regions(2, "regions");
  const std::uint64_t from_page = args.Whole(3, "fromPage");
  const std::uint64_t batch_bytes = args.Whole(4, "batchBytes");
  const std::uint64_t max_rows = args.WholeAtMost(5, "maxRows", 1u << 24);
  const std::uint64_t max_segment_bytes = args.Whole(6, "maxSegmentBytes");
  const std::uint64_t join_gap_pages = args.Whole(7, "joinGapPages");
  if (!args.ok()) return info.Env().Undefined();
  if (batch_bytes < kPageBytes || batch_bytes % kPageBytes != 0 ||
      max_segment_bytes < kPageBytes || max_segment_bytes % kPageBytes != 0) {
    args.FailRange("batchBytes and maxSegmentBytes must be whole pages, at least one");
  }
  if (max_rows == 0) args.FailRange("maxRows must be at least 1");
  if (from_page > page_count) args.FailRange("fromPage is past pageCount");
  const LayoutFault fault = CheckLayout(bits, page_count, regions);
  if (fault != LayoutFault::kNone) args.FailRange(Describe(fault));
  if (!args.ok()) return info.Env().Undefined();

  // A batch of one-page rows has no more rows than pages.
  const std::uint64_t most = std::min({max_rows, batch_bytes / kPageBytes, page_count + 1});
  const std::unique_ptr<Row[]> rows(new (std::nothrow) Row[most]);
  if (!rows) {
    args.FailRange("maxRows: out of memory");
    return info.Env().Undefined();
  }
  const CoalesceOutcome outcome =
      CoalesceBatch(bits, page_count, regions, from_page,
                    {batch_bytes, max_segment_bytes, join_gap_pages}, {rows.get(), most});
  auto packed = Napi::BigUint64Array::New(info.Env(), outcome.row_count * 3);
  if (packed.IsEmpty()) return info.Env().Undefined();  // the worker is being terminated
  if (outcome.row_count > 0) {
    std::memcpy(packed.Data(), rows.get(), outcome.row_count * sizeof(Row));
  }
  Napi::Object result = Napi::Object::New(info.Env());
  result.Set("rows", packed);
  Put(result, "bytes", static_cast<double>(outcome.bytes));
  Put(result, "nextPage", static_cast<double>(outcome.next_page));
  return result;
}

}  // namespace

void RegisterBitmap(Napi::Env env, Napi::Object exports) {
  Export(env, exports, "bitmapCount", Count);
  Export(env, exports, "bitmapOr", Combine<BitmapOr>);
  Export(env, exports, "bitmapAnd", Combine<BitmapAnd>);
  Export(env, exports, "bitmapAndNot", Combine<BitmapAndNot>);
  Export(env, exports, "bitmapSetRange", Range<BitmapSetRange>);
  Export(env, exports, "bitmapClearRange", Range<BitmapClearRange>);
  Export(env, exports, "coalesceBatch", Coalesce);
}

}  // namespace varve
