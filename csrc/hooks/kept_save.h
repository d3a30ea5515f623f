// The packed form of a save that the gate keeps: the tensor, its version at the save, and its place in the step. Python
// may replace the tensor by a packed view of its own, so that it can be offloaded.
#pragma once

#include <Python.h>

#include <cstdint>
#include <vector>

namespace vdnn::hooks {

class Ledger;

struct KeptSave final {
  PyObject_HEAD PyObject* tensor;  // a leaf itself, otherwise its detach(); or the packed view
  Ledger* ledger;                  // counts it; shared. Null once it was replaced
  std::int64_t version;
  std::int64_t step;
  std::int32_t lifetime;
  KeptSave* earlier;  // among those that the ledger counts
  KeptSave* later;
  PyObject* references;  // weak ones to it
};

// Takes `tensor` (a new reference). The ledger has counted the save already. Null with a Python error set if there is
// no memory.
PyObject* make_kept_save(PyObject* tensor, std::int64_t version, std::int64_t step, Ledger* ledger,
                         std::int32_t lifetime);

[[nodiscard]] bool is_kept_save(PyObject* object);

// Adds the type to the module. Returns false with a Python error set.
bool add_kept_save(PyObject* module);

// Counts the kept saves of one session that graphs still hold. Saves outlive the gate, so they share it. GIL held.
class Ledger final {
 public:
  static Ledger* make() { return new Ledger(); }
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;

  void hold() { ++holders_; }
  void drop() {
    if (--holders_ == 0) {
      delete this;
    }
  }

  // A step begins that has so many lifetimes.
  void begin_step(std::int32_t lifetimes);
  // The same for a step of which nothing is known: it notes which lifetimes end.
  void begin_unplanned_step();
  void saved(std::int32_t lifetime, std::int64_t storage_bytes);
  void freed(std::int64_t step, std::int32_t lifetime);
  void link(KeptSave* save);
  void unlink(KeptSave* save);

  [[nodiscard]] std::int64_t step() const { return step_; }
  [[nodiscard]] std::int64_t living() const { return living_; }          // saves, of all steps
  [[nodiscard]] std::int64_t kept_bytes() const { return kept_bytes_; }  // of this step
  // Of this step.
  [[nodiscard]] bool is_alive(std::int32_t lifetime) const { return saves_of(lifetime) > 0; }
  [[nodiscard]] std::int32_t saves_of(std::int32_t lifetime) const {
    const auto number = static_cast<std::size_t>(lifetime);
    return number < lifetimes_.size() ? lifetimes_[number].saves : 0;
  }
  // The save of this lifetime that was made last and is alive; null if there is none.
  [[nodiscard]] const KeptSave* newest(std::int32_t lifetime) const;
  // Its saves that are alive, as a list in the order of saves.
  [[nodiscard]] PyObject* saves_of_lifetime(long lifetime) const;
  // Its end is not noted: Python follows it from now on.
  void hand_over(std::int32_t lifetime) { lifetimes_[static_cast<std::size_t>(lifetime)].is_followed = false; }
  // Nothing of it was kept.
  void forget(std::int32_t lifetime);
  [[nodiscard]] bool has_ended() const { return !ended_.empty(); }
  // The lifetimes that have ended since the last call, as a list of numbers.
  PyObject* take_ended();
  // The lifetimes of this step that are alive, as a list of numbers.
  [[nodiscard]] PyObject* alive() const;
  // The saves that are alive, of all steps, as a list in the order of saves.
  [[nodiscard]] PyObject* saves() const;

 private:
  Ledger() = default;
  ~Ledger() = default;

  struct Lifetime {
    std::int64_t nbytes = 0;
    std::int32_t saves = 0;
    bool is_followed = true;  // its end is noted
  };
  std::vector<Lifetime> lifetimes_;  // of this step
  KeptSave* first_ = nullptr;
  KeptSave* last_ = nullptr;
  bool notes_ends_ = false;
  std::vector<std::int32_t> ended_;
  std::int64_t step_ = 0;
  std::int64_t living_ = 0;
  std::int64_t kept_bytes_ = 0;
  std::int64_t holders_ = 1;
};

}  // namespace vdnn::hooks
