#include "hooks/plain_run.h"

#include <array>
#include <cstddef>

#include "hooks/script.h"

namespace vdnn::hooks {
namespace {

// Functions of torch, in the order of the arguments of the type.
enum Part {
  kSetGradEnabled,
  kIsGradEnabled,
  kSetFunctionState,
  kFunctionState,
  kDisabled,           // the function state in which no mode and no subclass sees a call
  kIsAutocastEnabled,  // for any device
  kWithoutAutocast,    // makes a context without autocast
  kPlainRunParts,
};

struct PlainRun final {
  PyObject_HEAD std::array<PyObject*, kPlainRunParts> parts;
};

PyObject* enter_name = nullptr;
PyObject* exit_name = nullptr;

PlainRun* run_of(PyObject* self) {
  return reinterpret_cast<PlainRun*>(self);
}

// torch's modes of this thread, which this restores. No signal handler of Python runs in between.
class Modes final {
 public:
  explicit Modes(const PlainRun* run) : parts_(run->parts) {}
  Modes(const Modes&) = delete;
  Modes& operator=(const Modes&) = delete;
  ~Modes() {
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    if (autocast_) {
      Py_XDECREF(PyObject_CallMethodObjArgs(autocast_.get(), exit_name, Py_None, Py_None, Py_None, nullptr));
    }
    if (functions_) {
      Py_XDECREF(PyObject_CallOneArg(parts_[kSetFunctionState], functions_.get()));
    }
    if (had_grad_) {
      Py_XDECREF(PyObject_CallOneArg(parts_[kSetGradEnabled], had_grad_.get()));
    }
    PyErr_Restore(type, value, trace);
  }

  // Returns false with a Python error set.
  bool leave() {
    Reference had_grad = Reference::stolen(PyObject_CallNoArgs(parts_[kIsGradEnabled]));
    Reference functions = had_grad ? Reference::stolen(PyObject_CallNoArgs(parts_[kFunctionState])) : Reference();
    if (!functions) {
      return false;
    }
    had_grad_ = std::move(had_grad);
    functions_ = std::move(functions);
    if (!Reference::stolen(PyObject_CallOneArg(parts_[kSetGradEnabled], Py_False)) ||
        !Reference::stolen(PyObject_CallOneArg(parts_[kSetFunctionState], parts_[kDisabled]))) {
      return false;
    }
    const Reference is_autocast = Reference::stolen(PyObject_CallNoArgs(parts_[kIsAutocastEnabled]));
    if (!is_autocast || is_autocast.get() == Py_False) {
      return static_cast<bool>(is_autocast);
    }
    Reference autocast = Reference::stolen(PyObject_CallNoArgs(parts_[kWithoutAutocast]));
    if (!autocast || !Reference::stolen(PyObject_CallMethodNoArgs(autocast.get(), enter_name))) {
      return false;
    }
    autocast_ = std::move(autocast);
    return true;
  }

 private:
  const std::array<PyObject*, kPlainRunParts>& parts_;
  Reference had_grad_;
  Reference functions_;
  Reference autocast_;
};

// (function, *arguments): what the function returns.
PyObject* call(PyObject* self, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) == 0 || keywords != nullptr) {
    PyErr_SetString(PyExc_TypeError, "expected a function and its arguments, got no function, or keywords");
    return nullptr;
  }
  Modes modes(run_of(self));
  if (!modes.leave()) {
    return nullptr;
  }
  PyObject* const* given = &PyTuple_GET_ITEM(arguments, 0);
  return PyObject_Vectorcall(given[0], given + 1, static_cast<std::size_t>(PyTuple_GET_SIZE(arguments) - 1), nullptr);
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != kPlainRunParts || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0)) {
    PyErr_Format(PyExc_TypeError, "expected the %d parts of a plain run", static_cast<int>(kPlainRunParts));
    return nullptr;
  }
  PlainRun* run = run_of(type->tp_alloc(type, 0));  // zeroed
  if (run == nullptr) {
    return nullptr;
  }
  for (int part = 0; part < kPlainRunParts; ++part) {
    run->parts[static_cast<std::size_t>(part)] = Py_NewRef(PyTuple_GET_ITEM(arguments, part));
  }
  return reinterpret_cast<PyObject*>(run);
}

void dealloc(PyObject* self) {
  for (PyObject* part : run_of(self)->parts) {
    Py_XDECREF(part);
  }
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_call, reinterpret_cast<void*>(&call)},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.PlainRun", sizeof(PlainRun), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_plain_run(PyObject* module) {
  enter_name = PyUnicode_InternFromString("__enter__");
  exit_name = PyUnicode_InternFromString("__exit__");
  if (enter_name == nullptr || exit_name == nullptr) {
    return false;
  }
  const Reference type = Reference::stolen(PyType_FromSpec(&spec));
  return type && PyObject_SetAttrString(module, "PlainRun", type.get()) == 0;
}

}  // namespace vdnn::hooks
