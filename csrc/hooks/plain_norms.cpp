#include "hooks/plain_norms.h"

#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "hooks/node_notes.h"
#include "hooks/script.h"

namespace vdnn::hooks {
namespace {

// What a name has to refer to in a dict of a module of Python.
struct Global final {
  Reference names;
  Reference name;
  Reference original;
};

struct NormKind final {
  Reference type;
  Reference forward;
  bool reads_eps = false;  // else the node saves it
  bool reads_bias = false;
  std::vector<Global> globals;
};

// A function of torch and what it returns where nothing listens.
struct Silence final {
  Reference read;
  Reference expected;
};

struct PlainNorms final {
  PyObject_HEAD std::vector<NormKind>* kinds;
  std::vector<Silence>* silences;
  PyObject* hooks;    // a tuple of torch's dicts of global hooks, which have no other hook than that of the caller
  PyObject* classes;  // a tuple of the classes of tensors that torch calls nothing else for
  PyObject* nodes;    // a set of the names of the nodes of norms
  PyObject* grad_fn;  // torch's descriptor
};

// The arguments of a call that the module's attributes give.
struct Attributes final {
  bool has_eps = false;  // false: None
  double eps = 0;
  bool has_bias = false;

  bool operator==(const Attributes& other) const {
    return has_eps == other.has_eps && eps == other.eps && has_bias == other.has_bias;
  }
};

// The call that runs on a thread: such a module calls no other one.
struct Running final {
  PyObject* module = nullptr;  // borrowed, only compared
  std::int64_t begin = 0;
  Attributes attributes;
};

// Which modules made the last norms of a thread. As many as a recipe may have.
struct Made final {
  std::int64_t node = -1;
  std::uintptr_t module = 0;
};

constexpr int kAfterNorm = 4;  // nodes that one call may make after its norm: views, casts
constexpr std::size_t kMade = 32;

thread_local Running running;
thread_local std::array<Made, kMade> last_made;
thread_local std::size_t made_count = 0;

PyTypeObject* norms_type = nullptr;

struct Names final {
  PyObject *forward, *eps, *weight, *bias, *mean, *variance, *count, *parameters, *buffers, *pre_hooks;
  PyObject *node_name, *next, *eps_fact, *bias_fact;
};
Names names{};

PlainNorms* norms_of(PyObject* self) {
  return reinterpret_cast<PlainNorms*>(self);
}

bool has(PyObject* tuple, PyObject* object) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(tuple); ++index) {
    if (PyTuple_GET_ITEM(tuple, index) == object) {
      return true;
    }
  }
  return false;
}

bool is_plain(const PlainNorms* norms, PyObject* tensor) {
  return has(norms->classes, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
}

// The item of a dict, borrowed; null if there is none. None of the keys that are asked for can raise.
PyObject* item(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr) {
    PyErr_Clear();
  }
  return found;
}

const NormKind* kind_of(const PlainNorms* norms, PyObject* module) {
  for (const NormKind& one : *norms->kinds) {
    if (one.type.get() == reinterpret_cast<PyObject*>(Py_TYPE(module))) {
      return &one;
    }
  }
  return nullptr;
}

// True if the forward of the class and all that it calls is torch's.
bool is_original(const NormKind& kind) {
  auto* type = reinterpret_cast<PyTypeObject*>(kind.type.get());
  if (_PyType_Lookup(type, names.forward) != kind.forward.get() || _PyType_Lookup(type, names.eps) != nullptr ||
      _PyType_Lookup(type, names.bias) != nullptr) {
    return false;
  }
  for (const Global& one : kind.globals) {
    if (item(one.names.get(), one.name.get()) != one.original.get()) {
      return false;
    }
  }
  return true;
}

// True if each value is None or a plain tensor.
bool has_plain_values(const PlainNorms* norms, PyObject* dict) {
  Py_ssize_t position = 0;
  PyObject *key = nullptr, *value = nullptr;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    if (value != Py_None && !is_plain(norms, value)) {
      return false;
    }
  }
  return true;
}

// Reads the attributes. Returns false if another value may be passed.
bool read(const PlainNorms* norms, const NormKind& kind, PyObject* module, Attributes& found) {
  const Reference own = Reference::stolen(PyObject_GenericGetDict(module, nullptr));
  if (!own) {
    PyErr_Clear();
    return false;
  }
  for (PyObject* name : {names.forward, names.weight, names.bias, names.mean, names.variance, names.count}) {
    if (item(own.get(), name) != nullptr) {
      return false;
    }
  }
  PyObject* parameters = item(own.get(), names.parameters);
  PyObject* buffers = item(own.get(), names.buffers);
  PyObject* pre_hooks = item(own.get(), names.pre_hooks);
  if (parameters == nullptr || !PyDict_Check(parameters) || buffers == nullptr || !PyDict_Check(buffers) ||
      pre_hooks == nullptr || !PyDict_Check(pre_hooks) || PyDict_GET_SIZE(pre_hooks) != 0 ||
      !has_plain_values(norms, parameters) || !has_plain_values(norms, buffers)) {
    return false;
  }
  if (kind.reads_eps) {
    PyObject* eps = item(own.get(), names.eps);
    if (eps == nullptr || (eps != Py_None && !PyFloat_CheckExact(eps) && !PyLong_CheckExact(eps))) {
      return false;
    }
    found.has_eps = eps != Py_None;
    found.eps = found.has_eps ? PyFloat_AsDouble(eps) : 0;
    if (found.eps == -1.0 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();
      return false;
    }
  }
  if (kind.reads_bias) {
    PyObject* bias = item(parameters, names.bias);
    if (bias == nullptr) {
      return false;
    }
    found.has_bias = bias != Py_None;
  }
  return true;
}

// Returns 1 if nothing sees the call, 0 if something may, -1 with a Python error set.
int is_silent(const PlainNorms* norms) {
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(norms->hooks); ++index) {
    if (PyDict_GET_SIZE(PyTuple_GET_ITEM(norms->hooks, index)) != 1) {
      return 0;
    }
  }
  for (const Silence& one : *norms->silences) {
    const Reference found = Reference::stolen(PyObject_CallNoArgs(one.read.get()));
    if (!found) {
      return -1;
    }
    if (found.get() != one.expected.get()) {
      return 0;
    }
  }
  return 1;
}

void note_made(std::int64_t node, PyObject* module) {
  last_made[made_count++ % kMade] = {node, reinterpret_cast<std::uintptr_t>(module)};
}

// Returns false with a Python error set.
bool note_facts(const NormKind& kind, const Attributes& given, PyObject* node) {
  if (kind.reads_eps) {
    const Reference eps = given.has_eps ? Reference::stolen(PyFloat_FromDouble(given.eps)) : Reference(Py_None);
    if (!eps || !note_fact(node, names.eps_fact, eps.get())) {
      return false;
    }
  }
  return !kind.reads_bias || note_fact(node, names.bias_fact, given.has_bias ? Py_False : Py_True);
}

// The node that made the first input of a node, or None. Null with a Python error set.
Reference first_producer(PyObject* node) {
  const Reference edges = Reference::stolen(PyObject_GetAttr(node, names.next));
  if (!edges) {
    return {};
  }
  if (!PyTuple_Check(edges.get()) || PyTuple_GET_SIZE(edges.get()) == 0 ||
      !PyTuple_Check(PyTuple_GET_ITEM(edges.get(), 0)) || PyTuple_GET_SIZE(PyTuple_GET_ITEM(edges.get(), 0)) == 0) {
    return Reference(Py_None);
  }
  return Reference(PyTuple_GET_ITEM(PyTuple_GET_ITEM(edges.get(), 0), 0));
}

// Functions of the module.

PyObject* norm_was_made(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  std::int64_t node = 0;
  if (count != 2) {
    PyErr_Format(PyExc_TypeError, "expected a number and a module, got %zd arguments", count);
    return nullptr;
  }
  if (!number_of(arguments[0], node)) {
    return nullptr;
  }
  note_made(node, arguments[1]);
  Py_RETURN_NONE;
}

PyObject* maker_of_norm(PyObject*, PyObject* boxed) {
  std::int64_t node = 0;
  if (!number_of(boxed, node)) {
    return nullptr;
  }
  for (const Made& one : last_made) {
    if (one.node == node && one.module != 0) {
      return PyLong_FromSize_t(one.module);
    }
  }
  Py_RETURN_NONE;
}

// The type.

bool add_kind(PyObject* given, std::vector<NormKind>& kinds) {
  PyObject *type = nullptr, *forward = nullptr, *globals = nullptr;
  int reads_eps = 0, reads_bias = 0;
  if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "O!OppO!", &PyType_Type, &type, &forward, &reads_eps,
                                                 &reads_bias, &PyTuple_Type, &globals)) {
    return false;
  }
  NormKind kind{Reference(type), Reference(forward), reads_eps != 0, reads_bias != 0, {}};
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(globals); ++index) {
    PyObject *names_of = nullptr, *name = nullptr, *original = nullptr;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(globals, index), "O!UO", &PyDict_Type, &names_of, &name, &original)) {
      return false;
    }
    kind.globals.push_back({Reference(names_of), Reference(name), Reference(original)});
  }
  kinds.push_back(std::move(kind));
  return true;
}

bool add_silence(PyObject* given, std::vector<Silence>& silences) {
  PyObject *read_it = nullptr, *expected = nullptr;
  if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "OO", &read_it, &expected)) {
    return false;
  }
  silences.push_back({Reference(read_it), Reference(expected)});
  return true;
}

PyObject* make_norms(PyTypeObject* type, PyObject* arguments, PyObject*) {
  PyObject *kinds = nullptr, *silences = nullptr, *hooks = nullptr, *classes = nullptr, *nodes = nullptr,
           *grad_fn = nullptr;
  if (!PyArg_ParseTuple(arguments, "O!O!O!O!O!O", &PyTuple_Type, &kinds, &PyTuple_Type, &silences, &PyTuple_Type,
                        &hooks, &PyTuple_Type, &classes, &PyFrozenSet_Type, &nodes, &grad_fn)) {
    return nullptr;
  }
  auto made_kinds = std::make_unique<std::vector<NormKind>>();
  auto made_silences = std::make_unique<std::vector<Silence>>();
  bool is_right = Py_TYPE(grad_fn)->tp_descr_get != nullptr;
  for (Py_ssize_t index = 0; is_right && index < PyTuple_GET_SIZE(kinds); ++index) {
    is_right = add_kind(PyTuple_GET_ITEM(kinds, index), *made_kinds);
  }
  for (Py_ssize_t index = 0; is_right && index < PyTuple_GET_SIZE(silences); ++index) {
    is_right = add_silence(PyTuple_GET_ITEM(silences, index), *made_silences);
  }
  for (Py_ssize_t index = 0; is_right && index < PyTuple_GET_SIZE(hooks); ++index) {
    is_right = PyDict_Check(PyTuple_GET_ITEM(hooks, index));
  }
  if (!is_right) {
    if (PyErr_Occurred() == nullptr) {
      PyErr_SetString(PyExc_TypeError, "expected the parts of plain norms");
    }
    return nullptr;
  }
  PlainNorms* made = norms_of(type->tp_alloc(type, 0));  // zeroed
  if (made == nullptr) {
    return nullptr;
  }
  made->kinds = made_kinds.release();
  made->silences = made_silences.release();
  made->hooks = Py_NewRef(hooks);
  made->classes = Py_NewRef(classes);
  made->nodes = Py_NewRef(nodes);
  made->grad_fn = Py_NewRef(grad_fn);
  return reinterpret_cast<PyObject*>(made);
}

// It is in no cycle that could become garbage: what it has is torch's.
void dealloc(PyObject* self) {
  PlainNorms* norms = norms_of(self);
  delete norms->kinds;
  delete norms->silences;
  Py_XDECREF(norms->hooks);
  Py_XDECREF(norms->classes);
  Py_XDECREF(norms->nodes);
  Py_XDECREF(norms->grad_fn);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make_norms)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {0, nullptr},
};

PyType_Spec spec = {"vdnn._C.PlainNorms", sizeof(PlainNorms), 0, Py_TPFLAGS_DEFAULT, slots};

PyMethodDef functions[] = {
    {"norm_was_made", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&norm_was_made)), METH_FASTCALL,
     nullptr},
    {"maker_of_norm", maker_of_norm, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

bool intern() {
  const std::pair<PyObject**, const char*> all[] = {
      {&names.forward, "forward"},
      {&names.eps, "eps"},
      {&names.weight, "weight"},
      {&names.bias, "bias"},
      {&names.mean, "running_mean"},
      {&names.variance, "running_var"},
      {&names.count, "num_batches_tracked"},
      {&names.parameters, "_parameters"},
      {&names.buffers, "_buffers"},
      {&names.pre_hooks, "_forward_pre_hooks"},
      {&names.node_name, "name"},
      {&names.next, "next_functions"},
      {&names.eps_fact, "eps"},
      {&names.bias_fact, "no bias"},
  };
  for (const auto& [name, text] : all) {
    *name = PyUnicode_InternFromString(text);
    if (*name == nullptr) {
      return false;
    }
  }
  return true;
}

}  // namespace

bool is_plain_norms(PyObject* object) {
  return Py_TYPE(object) == norms_type;
}

void forget_norm() {
  running.module = nullptr;
}

bool is_norm_running(PyObject* module) {
  return running.module == module;
}

int begin_norm(PyObject* norms, PyObject* module, PyObject* arguments, std::int64_t node) {
  const PlainNorms* known = norms_of(norms);
  const NormKind* kind = kind_of(known, module);
  Running call;
  if (kind == nullptr || !PyTuple_CheckExact(arguments) || PyTuple_GET_SIZE(arguments) != 1 ||
      !is_plain(known, PyTuple_GET_ITEM(arguments, 0)) || !is_original(*kind) ||
      !read(known, *kind, module, call.attributes)) {
    return 0;
  }
  const int silent = is_silent(known);
  if (silent > 0) {
    call.module = module;
    call.begin = node;
    running = call;
  }
  return silent;
}

bool end_norm(PyObject* norms, PyObject* module, PyObject* output, std::int64_t node) {
  const PlainNorms* known = norms_of(norms);
  const Running call = running;
  forget_norm();
  const NormKind* kind = kind_of(known, module);
  Attributes now;
  if (kind == nullptr || !is_plain(known, output) || !read(known, *kind, module, now) || !(now == call.attributes)) {
    return true;
  }
  Reference maker = Reference::stolen(
      Py_TYPE(known->grad_fn)->tp_descr_get(known->grad_fn, output, reinterpret_cast<PyObject*>(Py_TYPE(output))));
  for (int distance = 0; distance < kAfterNorm; ++distance) {
    if (!maker || maker.get() == Py_None) {
      break;
    }
    std::int64_t number = 0;
    if (!sequence_number(maker.get(), number)) {
      return false;
    }
    if (number < call.begin || number >= node) {
      return true;  // a leaf's, or made before the call or on another thread
    }
    const Reference name = Reference::stolen(PyObject_CallMethodNoArgs(maker.get(), names.node_name));
    const int is_norm = name ? PySet_Contains(known->nodes, name.get()) : -1;
    if (is_norm < 0) {
      return false;
    }
    if (is_norm > 0) {
      note_made(number, module);
      return note_facts(*kind, now, maker.get());
    }
    maker = first_producer(maker.get());
  }
  return static_cast<bool>(maker);
}

bool add_plain_norms(PyObject* module) {
  if (norms_type == nullptr) {
    norms_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }
  return norms_type != nullptr && intern() &&
         PyObject_SetAttrString(module, "PlainNorms", reinterpret_cast<PyObject*>(norms_type)) == 0 &&
         PyModule_AddFunctions(module, functions) == 0;
}

}  // namespace vdnn::hooks
