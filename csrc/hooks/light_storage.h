// A storage that the gate itself moves or discards in a settled step: the light form of Python's ManagedStorage.
//
// The packed forms of its saves own it. It is light only while its step is settled. On any trouble, and when the gate
// closes, it is handed over: Python makes a full managed storage of what is here, and its saves own packed views.
#pragma once

#include <Python.h>

#include <cstdint>
#include <memory>

#include "hooks/kept_save.h"
#include "hooks/script.h"
#include "transfer/transfer_queue.h"

namespace vdnn::hooks {

struct Mover;
class LightStorage;

// The original storage, until it is released. The queue holds it while a copy reads the bytes.
struct LightSource final {
  PyObject_HEAD PyObject* storage;  // null: released, or handed over
  PyObject* address;                // of the storage's native object, as torch gives it
  PyObject* event;                  // of the first save, as Python knows it
  PyObject* full;                   // the source that Python made of it; or null
  PyObject* others;                 // refers to the storage weakly, if it was released while others held it; or null
  Mover* mover;
  LightStorage* owner;  // null: its graph was freed
  Address bytes_at;
  std::int64_t nbytes;
};

// The packed form of one save.
struct LightSave final {
  PyObject_HEAD LightStorage* storage;
  PyObject* full;  // the packed view that Python made of it; or null
  LightSave* next;
  LightSave* previous;
  const Moving* moving;  // of the script that `storage` holds
  std::int64_t offset;   // in elements
  PyObject* references;  // weak ones to it
};

// Only its holders drop it. GIL held.
class LightStorage final {
 public:
  // Without a holder yet. Null with a Python error set if there is no memory.
  static LightStorage* make(Mover* mover, Ledger* ledger, ScriptObject* script, const Event& event);
  LightStorage(const LightStorage&) = delete;
  LightStorage& operator=(const LightStorage&) = delete;

  void hold() { ++holders_; }
  void drop() {
    if (--holders_ == 0) {
      delete this;
    }
  }
  // A new packed form. Null with a Python error set if there is no memory.
  [[nodiscard]] LightSave* save(const Moving& moving, std::int64_t offset);
  void freed(LightSave* save);
  void forget_reload();
  // Python has a full managed storage of it from now on, and `views` are its packed views, in the order of the saves.
  void became(PyObject* views, PyObject* source);

  Mover* const mover;
  Ledger* const ledger;
  const std::int64_t step;
  const std::int32_t lifetime;
  const Moving& first;  // its first save
  Reference witness;    // see version_counter.py
  std::int64_t version = 0;
  LightSource* source = nullptr;
  std::shared_ptr<HostCopy> copy;
  std::shared_ptr<Reload> reload;
  Reference recipe;  // of a storage that was discarded; else null
  Reference target;  // the reloaded or recomputed tensor
  Address target_at = 0;
  bool is_waited_for = false;
  bool is_handed_over = false;
  std::int64_t views = 0;
  std::int64_t more_uses = 0;  // by recomputes
  std::int64_t unused_views = 0;
  LightSave* newest = nullptr;

 private:
  LightStorage(Mover* mover, Ledger* ledger, ScriptObject* script, const Event& event);
  ~LightStorage();

  const Reference script_;
  std::int64_t holders_ = 0;
};

// Holds a storage while other code may free its saves.
class Held final {
 public:
  explicit Held(LightStorage* storage) : storage_(storage) { storage_->hold(); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  ~Held() { storage_->drop(); }

 private:
  LightStorage* storage_;
};

// Of its storage's native object.
inline std::uintptr_t native_address(const LightSource* source) {
  return reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(source->address));
}
[[nodiscard]] bool is_light_save(PyObject* object);
[[nodiscard]] bool is_light_source(PyObject* object);
// Forgets that its copy waits for its operation, if it does.
void wait_no_more(const LightStorage* storage);
// A source without an owner. Null with a Python error set.
[[nodiscard]] LightSource* make_light_source(Mover* mover, PyObject* event, PyObject* storage, PyObject* address);
// Releases the storage. Called once the owner stream waits for the copy. Returns false with a Python error set.
bool release_source(LightSource* source);

// Adds the types to the module. Returns false with a Python error set.
bool add_light_storage(PyObject* module);

}  // namespace vdnn::hooks
