// Proves the logic of kernels.cu without a GPU: the very same source, compiled as C++ over cuda_on_host.h, must give
// the reference's bytes for every kernel, many sizes, alignments and launch geometries, and must leave
// the bytes around its target alone. Prints "N passed, M failed".

#include "cuda_on_host.h"
// After the shim, whose names it uses.
#include "codec/kernels.cu"

#include <vector>

#include "codec/codec.h"
#include "codec/launch_geometry.h"

namespace {

using vdnn::Kernel;

struct Entry {
  const char* name;
  void (*function)(KernelCall);
};
#define VDNN_ENTRY(function) {#function, function}
// In the order of vdnn::Kernel.
constexpr Entry entries[vdnn::kernel_count] = {VDNN_ENTRY(vdnn_pack_bits), VDNN_ENTRY(vdnn_unpack_bits),
                                               VDNN_ENTRY(vdnn_content_hash)};

constexpr uint8_t guard = 0xa5;
constexpr uint64_t guard_bytes = 64;

// A little generator of our own: the same bytes on every machine.
class Bytes final {
 public:
  uint8_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint8_t>(state_ >> 56U);
  }
  // A third of them 0, so that masks have both kinds of element.
  uint8_t next_often_zero() { return next() < 85 ? 0 : next(); }

 private:
  uint64_t state_ = 20160912;
};

// Memory for a range at a given offset from an address aligned to 16, and not a byte after it, so that an address
// sanitizer sees every access beyond its end. operator new aligns to 16.
struct Memory {
  std::vector<uint8_t> bytes;
  uint64_t offset;
  [[nodiscard]] uint64_t address() const { return reinterpret_cast<uint64_t>(bytes.data()) + offset; }
};

struct Score {
  unsigned passed = 0;
  unsigned failed = 0;
};

struct Case {
  Kernel kernel;
  uint64_t count;
  uint64_t source_offset;
  uint64_t target_offset;
  vdnn::LaunchGeometry geometry;
};

// The target as the kernel, or as the reference, leaves it: guards, the answer, guards.
std::vector<uint8_t> answer(const Case& c, const Memory& source, bool by_kernel) {
  KernelCall call{c.kernel, source.address(), 0, c.count};
  const uint64_t bytes = vdnn::target_bytes(call);
  Memory target{std::vector<uint8_t>(guard_bytes + c.target_offset + bytes + guard_bytes, guard),
                guard_bytes + c.target_offset};
  call.target = target.address();
  if (by_kernel) {
    // As launch_geometry.h asks of the host.
    if (c.kernel == Kernel::ContentHash) std::memset(reinterpret_cast<void*>(call.target), 0, bytes);
    cuda_on_host::launch(entries[static_cast<unsigned>(c.kernel)].function, call, c.geometry.blocks,
                         c.geometry.threads);
  } else {
    vdnn::check(call);
    vdnn::run_on_cpu(call);
  }
  return target.bytes;
}

void prove(const Case& c, Score& score) {
  const KernelCall sized{c.kernel, 0, 0, c.count};
  Memory source{std::vector<uint8_t>(c.source_offset + vdnn::source_bytes(sized)), c.source_offset};
  Bytes random;
  for (auto& byte : source.bytes) byte = random.next_often_zero();
  if (source.bytes.empty()) source.bytes.push_back(0);  // an empty vector has no address
  if (answer(c, source, true) == answer(c, source, false)) {
    ++score.passed;
    return;
  }
  ++score.failed;
  std::printf("%s differs from its reference: count %llu, offsets %llu and %llu, %u x %u\n",
              vdnn::kernel_symbol(c.kernel), static_cast<unsigned long long>(c.count),
              static_cast<unsigned long long>(c.source_offset), static_cast<unsigned long long>(c.target_offset),
              c.geometry.blocks, c.geometry.threads);
}

// A hash is a sum of atomic additions: its target is always aligned.
uint64_t allowed_target_offset(Kernel kernel, uint64_t offset) {
  return kernel == Kernel::ContentHash ? offset / 8 * 8 : offset;
}

void prove_small_sizes(Kernel kernel, Score& score) {
  constexpr uint64_t counts[] = {0, 1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 255, 1000, 4099};
  constexpr vdnn::LaunchGeometry geometries[] = {{1, 32}, {3, 64}, {5, 96}, {2, 256}};
  unsigned turn = 0;
  for (const uint64_t count : counts) {
    for (const auto& geometry : geometries) prove({kernel, count, 0, 0, geometry}, score);
    // Each offset of one side with several of the other; 7 is prime to 16, so all are met.
    for (uint64_t offset = 0; offset < 16; ++offset) {
      const uint64_t pairs[][2] = {{offset, 0}, {0, offset}, {offset, offset}, {offset, offset * 7 % 16}};
      for (const auto& pair : pairs) {
        prove({kernel, count, pair[0], allowed_target_offset(kernel, pair[1]), geometries[++turn % 4]}, score);
      }
    }
  }
}

void prove_large_sizes(Kernel kernel, Score& score) {
  constexpr uint64_t count = 1000003;
  const KernelCall call{kernel, 0, 0, count};
  prove({kernel, count, 0, 0, vdnn::launch_geometry(call)}, score);
  prove({kernel, count, 0, 0, {3, 64}}, score);
  prove({kernel, count, 1, allowed_target_offset(kernel, 3), {7, 1024}}, score);
}

void prove_names(Score& score) {
  for (unsigned i = 0; i < vdnn::kernel_count; ++i) {
    const bool same = std::strcmp(entries[i].name, vdnn::kernel_symbol(static_cast<Kernel>(i))) == 0;
    ++(same ? score.passed : score.failed);
    if (!same) std::printf("kernel %u is %s here and another name in kernel_symbol()\n", i, entries[i].name);
  }
}

}  // namespace

int main() {
  Score score;
  prove_names(score);
  for (unsigned i = 0; i < vdnn::kernel_count; ++i) {
    const auto kernel = static_cast<Kernel>(i);
    prove_small_sizes(kernel, score);
    prove_large_sizes(kernel, score);
  }
  std::printf("%u passed, %u failed\n", score.passed, score.failed);
  return score.failed == 0 ? 0 : 1;
}
