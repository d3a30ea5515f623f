#include "hooks/norm_calls.h"

#include <frameobject.h>  // PyFrame_GetBack, which Python 3.10 does not declare elsewhere

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "hooks/kept_save.h"
#include "hooks/light_storage.h"
#include "hooks/node_notes.h"
#include "hooks/script.h"

namespace vdnn::hooks {
namespace {

// A function of torch.nn.functional, and the facts that the nodes of its calls lack.
struct Norm final {
  Reference code;
  Reference nodes;  // a set of their names
  bool lacks_eps = false;
  bool lacks_bias = false;
};

// What Python gives, once.
struct Watched final {
  std::vector<Norm> norms;
  std::vector<Reference> passing;  // code of functions that pass on the arguments that they are given
  Reference folder;                // in which all functions do so: ours
};

struct Call final {
  std::int64_t node = -1;
  const Norm* norm = nullptr;
  double eps = 0;
  bool has_eps = false;  // false: None
  bool has_bias = false;
  std::array<std::uintptr_t, 8> storages{};  // native addresses of what the node saved: no norm saves more
  std::size_t saves = 0;
};

constexpr std::int64_t kCalls = 1 << 12;  // that a thread remembers
constexpr int kPassing = 8;               // frames between torch's function and the hook

Watched* watched = nullptr;
PyObject *locals_name = nullptr, *node_name = nullptr, *eps_name = nullptr, *bias_name = nullptr,
         *storage_name = nullptr, *address_name = nullptr, *managed_name = nullptr, *native_address_name = nullptr,
         *input_name = nullptr, *data_name = nullptr;

std::array<Call, kCalls>& calls_here() {
  static thread_local std::unique_ptr<std::array<Call, kCalls>> of_thread;
  if (!of_thread) {
    of_thread = std::make_unique<std::array<Call, kCalls>>();
  }
  return *of_thread;
}

Call& slot(std::int64_t node) {
  return calls_here()[static_cast<std::size_t>(node & (kCalls - 1))];
}

const Norm* norm_of(PyObject* code) {
  for (const Norm& one : watched->norms) {
    if (one.code.get() == code) {
      return &one;
    }
  }
  return nullptr;
}

bool passes_on(PyObject* code) {
  for (const Reference& one : watched->passing) {
    if (one.get() == code) {
      return true;
    }
  }
  PyObject* file = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  return PyUnicode_Check(file) && PyUnicode_Tailmatch(file, watched->folder.get(), 0, PY_SSIZE_T_MAX, -1) == 1;
}

// Notes the arguments. An eps of another kind than a number is not noted. Returns false with a Python error set.
bool note(const Norm& norm, PyObject* frame, std::int64_t node) {
  const Reference locals = Reference::stolen(PyObject_GetAttr(frame, locals_name));
  const Reference bias =
      locals && norm.lacks_bias ? Reference::stolen(PyObject_GetItem(locals.get(), bias_name)) : Reference(Py_None);
  const Reference eps =
      locals && norm.lacks_eps ? Reference::stolen(PyObject_GetItem(locals.get(), eps_name)) : Reference(Py_None);
  if (!locals || !bias || !eps) {
    return false;
  }
  Call call{node, &norm, 0, eps.get() != Py_None, bias.get() != Py_None, {}, 0};
  if (call.has_eps) {
    if (!PyFloat_Check(eps.get()) && !PyLong_Check(eps.get())) {
      return true;
    }
    call.eps = PyFloat_AsDouble(eps.get());
    if (call.eps == -1.0 && PyErr_Occurred() != nullptr) {
      return false;
    }
  }
  slot(node) = call;
  return true;
}

// The native address of a tensor's storage; 0 if it has none.
std::uintptr_t storage_of(PyObject* tensor) {
  const Reference storage = Reference::stolen(PyObject_CallMethodNoArgs(tensor, storage_name));
  const Reference address = storage ? Reference::stolen(PyObject_GetAttr(storage.get(), address_name)) : Reference();
  const auto found = address ? reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address.get())) : 0;
  PyErr_Clear();
  return found;
}

// The same of what a pack hook returned.
std::uintptr_t packed_storage_of(PyObject* packed) {
  if (is_light_save(packed) && reinterpret_cast<LightSave*>(packed)->full == nullptr) {
    const LightSource* source = reinterpret_cast<LightSave*>(packed)->storage->source;
    return source == nullptr ? 0 : native_address(source);
  }
  PyObject* held = is_light_save(packed)  ? reinterpret_cast<LightSave*>(packed)->full
                   : is_kept_save(packed) ? reinterpret_cast<KeptSave*>(packed)->tensor
                   : PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) == 2 ? PyTuple_GET_ITEM(packed, 0)
                                                                                 : packed;
  const Reference managed = Reference::stolen(PyObject_GetAttr(held, managed_name));
  if (!managed) {
    PyErr_Clear();
    return storage_of(held);
  }
  const Reference address = Reference::stolen(PyObject_GetAttr(managed.get(), native_address_name));
  const auto found = address ? reinterpret_cast<std::uintptr_t>(PyLong_AsVoidPtr(address.get())) : 0;
  PyErr_Clear();
  return found;
}

// True if the node saved, as its input, a storage that was packed in this call.
bool made(const Call& call, PyObject* node) {
  const Reference raw = Reference::stolen(PyObject_GetAttr(node, input_name));
  const Reference packed = raw ? Reference::stolen(PyObject_GetAttr(raw.get(), data_name)) : Reference();
  PyErr_Clear();
  const std::uintptr_t storage = packed && packed.get() != Py_None ? packed_storage_of(packed.get()) : 0;
  return storage != 0 && std::find(call.storages.begin(), call.storages.end(), storage) != call.storages.end();
}

// True if the node is one of those that this function makes. -1 with a Python error set.
int is_made_by(const Norm& norm, PyObject* node) {
  const Reference name = Reference::stolen(PyObject_CallMethodNoArgs(node, node_name));
  return name ? PySet_Contains(norm.nodes.get(), name.get()) : -1;
}

// Notes the call whose node is being made, if it is that of a norm. Returns false with a Python error set.
bool note_call(std::int64_t node, bool in_python) {
  Reference frame(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  for (int distance = 0; frame && distance < kPassing; ++distance) {
    auto* native = reinterpret_cast<PyFrameObject*>(frame.get());
    const Reference code = Reference::stolen(reinterpret_cast<PyObject*>(PyFrame_GetCode(native)));
    const Norm* norm = norm_of(code.get());
    if (norm != nullptr) {
      return note(*norm, frame.get(), node);
    }
    if (!(in_python && distance == 0) && !passes_on(code.get())) {
      return true;
    }
    frame = Reference::stolen(reinterpret_cast<PyObject*>(PyFrame_GetBack(native)));
  }
  return true;
}

// Functions of the module.

// ((code, names of nodes, lacks eps, lacks bias), ...), codes of functions that pass on, the folder of ours
PyObject* watch_norm_calls(PyObject*, PyObject* arguments) {
  PyObject *norms = nullptr, *passing = nullptr, *folder = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!U", &PyTuple_Type, &norms, &PyTuple_Type, &passing, &folder)) {
    return nullptr;
  }
  auto made = std::make_unique<Watched>();
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(norms); ++index) {
    PyObject *code = nullptr, *nodes = nullptr, *given = PyTuple_GET_ITEM(norms, index);
    int lacks_eps = 0, lacks_bias = 0;
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "O!O!pp", &PyCode_Type, &code, &PyFrozenSet_Type, &nodes, &lacks_eps, &lacks_bias)) {
      if (PyErr_Occurred() == nullptr) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of four for each function of norms");
      }
      return nullptr;
    }
    made->norms.push_back({Reference(code), Reference(nodes), lacks_eps != 0, lacks_bias != 0});
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(passing); ++index) {
    made->passing.emplace_back(PyTuple_GET_ITEM(passing, index));
  }
  made->folder = Reference(folder);
  // What is noted points into the one before, so that stays.
  watched = made.release();
  Py_RETURN_NONE;
}

// (node, name of the fact, what to return if it is not known)
PyObject* fact_of_norm(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 3) {
    PyErr_Format(PyExc_TypeError, "expected a node, a name and an object, got %zd arguments", count);
    return nullptr;
  }
  std::int64_t number = 0;
  if (!sequence_number(arguments[0], number)) {
    return nullptr;
  }
  const Call call = number < 0 ? Call() : slot(number);
  if (call.node != number || call.norm == nullptr) {
    return Py_NewRef(arguments[2]);
  }
  const int is_made = made(call, arguments[0]) ? is_made_by(*call.norm, arguments[0]) : 0;
  const int is_eps = is_made < 0 ? -1 : PyUnicode_Compare(arguments[1], eps_name) == 0;
  if (is_eps < 0 || PyErr_Occurred() != nullptr) {
    return nullptr;
  }
  if (is_made == 0 || !(is_eps != 0 ? call.norm->lacks_eps : call.norm->lacks_bias)) {
    return Py_NewRef(arguments[2]);
  }
  if (is_eps == 0) {
    return PyBool_FromLong(!call.has_bias);
  }
  return call.has_eps ? PyFloat_FromDouble(call.eps) : Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"watch_norm_calls", watch_norm_calls, METH_VARARGS, nullptr},
    {"fact_of_norm", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&fact_of_norm)), METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool note_norm_save(std::int64_t node, PyObject* tensor, bool is_first, bool in_python) {
  if (watched == nullptr || (is_first && !note_call(node, in_python))) {
    return watched == nullptr;
  }
  Call& call = slot(node);
  if (call.node == node) {
    call.storages[call.saves++ % call.storages.size()] = storage_of(tensor);
  }
  return true;
}

bool add_norm_calls(PyObject* module) {
  const std::pair<PyObject**, const char*> names[] = {
      {&locals_name, "f_locals"},
      {&node_name, "name"},
      {&eps_name, "eps"},
      {&bias_name, "bias"},
      {&storage_name, "untyped_storage"},
      {&address_name, "_cdata"},
      {&managed_name, "managed"},
      {&native_address_name, "native_address"},
      {&input_name, "_raw_saved_input"},
      {&data_name, "data"},
  };
  for (const auto& [name, text] : names) {
    *name = PyUnicode_InternFromString(text);
    if (*name == nullptr) {
      return false;
    }
  }
  return PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace vdnn::hooks
