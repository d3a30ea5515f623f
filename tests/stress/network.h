// A network without arithmetic: each layer saves a buffer in the forward pass and wants it back in the backward pass.
//
// What it saves it offloads; a source that stays (no host memory, or a copy that failed) is kept as torch would keep
// it. Reloads are issued in reverse order, a few layers ahead. Every buffer is compared byte for byte before it goes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "compute_stream.h"
#include "rig.h"

namespace vdnn::stress {

class Network {
 public:
  Network(const Rig& rig, ComputeStream& compute, std::uint64_t seed, Counts& counts);

  void train_step(std::uint64_t layers);
  // The first half of a step: an interrupted program gets no further.
  void forward(std::uint64_t layers);
  // After an error: lets go of everything, wherever it was.
  void forget() { activations_.clear(); }

 private:
  struct Activation {
    std::uint64_t bytes = 0;
    std::uint64_t content = 0;
    std::shared_ptr<HostCopy> copy;
    std::shared_ptr<Buffer> resident;  // the source, where it stays on the device
    std::shared_ptr<Buffer> target;
    std::shared_ptr<Reload> reload;
  };
  void save(std::shared_ptr<Buffer> source, std::uint64_t content);
  void after_layer();
  void backward();
  void reload_ahead(std::size_t index, std::size_t look_ahead);
  void issue(Activation& activation);
  void keep_failed_source(Activation& activation);
  void check_on_host(const Activation& activation);
  void consume(Activation& activation);

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<TransferQueue> queue_;
  ComputeStream& compute_;
  Dice dice_;
  Counts& counts_;
  std::vector<Activation> activations_;
};

}  // namespace vdnn::stress
