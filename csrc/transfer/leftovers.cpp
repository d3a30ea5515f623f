// Takes over the references that destroyed queues parked.
#include "transfer/leftovers.h"

#include <iterator>

#include "device/errors.h"
#include "device/parked.h"

namespace vdnn {

std::vector<Keepalive> Leftovers::take_all() {
  std::vector<Keepalive> finished;
  for (Leftovers* left = parked<Leftovers>().take_all(); left != nullptr;) {
    std::unique_ptr<Leftovers> owned(left);
    left = owned->next_returned;
    bool running = false;
    for (const Stream stream : {owned->to_host, owned->to_device}) {
      try {
        owned->device->drain(stream);
      } catch (const DriverFailure&) {
        running = true;
      } catch (const Error&) {
        continue;  // a closed device was drained; on a lost device nothing runs any more
      }
    }
    if (running) {
      parked<Leftovers>().push(owned.release());  // for the next call; without a notice, which would repeat at once
      continue;
    }
    owned->device->give_back(kToHost, owned->to_host);
    owned->device->give_back(kToDevice, owned->to_device);
    std::move(owned->keepalives.begin(), owned->keepalives.end(), std::back_inserter(finished));
  }
  return finished;
}

}  // namespace vdnn
