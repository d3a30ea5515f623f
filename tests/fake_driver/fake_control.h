// The knobs and counters of the fake driver, for tests: what a real driver does not have.
//
// C linkage, so that Python reaches them (control.py). They are no driver calls: they are not counted, need no
// context, and never block on a stream. Indices count from 0, the "nth" of faults from 1.
#pragma once

#include <cstdint>

#define VDNN_FAKE_CONTROL extern "C" __attribute__((visibility("default")))

// Every stream operation is preceded by a random pause of up to max_microseconds; 0 is none.
VDNN_FAKE_CONTROL void fake_set_delays(std::uint64_t seed, std::uint64_t max_microseconds);
// While held, created streams run only what a blocking call needs. A query needs nothing.
VDNN_FAKE_CONTROL void fake_hold_streams(int held);

// The nth call from now returns `code` and does nothing.
VDNN_FAKE_CONTROL void fake_fail_nth(std::uint64_t nth, int code);
// The same, counting one entry point; its "_v2" may be left out. 0 if the driver has no such entry point.
VDNN_FAKE_CONTROL int fake_fail_call(const char* name, std::uint64_t nth, int code);
// The nth copy, kernel or memset to run from now does not, and the context is lost with `code`.
VDNN_FAKE_CONTROL void fake_fail_async(std::uint64_t nth, int code);
// Armed faults that have not fired.
VDNN_FAKE_CONTROL std::uint64_t fake_faults_pending();

VDNN_FAKE_CONTROL void fake_set_device_count(int count);
VDNN_FAKE_CONTROL void fake_set_device_capacity(std::uint64_t bytes);
VDNN_FAKE_CONTROL void fake_set_host_capacity(std::uint64_t bytes);

// Clears faults, a lost context, hold, delays, counters, logs and limits. Live objects stay; where none of a kind
// is alive, its names in the issue log start from 1 again.
VDNN_FAKE_CONTROL void fake_reset();

// "context", "stream", "event", "module", "device_bytes", "host_bytes" or "pinned_ranges"; -1 for any other kind.
VDNN_FAKE_CONTROL std::int64_t fake_live(const char* kind);
// Streams created without the non-blocking flag since the last reset.
VDNN_FAKE_CONTROL std::uint64_t fake_blocking_streams();

// Entry points called since the last reset, refused calls included, cuGetErrorName excluded.
VDNN_FAKE_CONTROL std::uint64_t fake_calls();
VDNN_FAKE_CONTROL const char* fake_call_name(std::uint64_t index);
// What was put on streams since the last reset, as "copy_d2h s1 4096" or "wait s1 e3v2"; s0 is the legacy stream.
// The text is valid until the next reset; "" beyond the first million.
VDNN_FAKE_CONTROL std::uint64_t fake_issue_count();
VDNN_FAKE_CONTROL const char* fake_issue(std::uint64_t index);
