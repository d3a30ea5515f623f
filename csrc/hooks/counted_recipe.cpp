#include "hooks/counted_recipe.h"

// Python.h comes first
#include <structmember.h>

#include <cstddef>

#include "hooks/light_storage.h"
#include "hooks/mover_state.h"

namespace vdnn::hooks {
namespace {

PyObject *recipe_operands = nullptr, *recipe_light = nullptr, *operand_managed = nullptr, *managed_views = nullptr,
         *must_be_recomputed = nullptr;

struct CountedRecipe final {
  PyObject_HEAD PyObject* recipe;
  PyObject* operands;  // tuples: the packed views and the light saves that it reads
  PyObject* light;
  Py_ssize_t counted;  // the first ones of both, in this order, of which a use is counted
};

CountedRecipe* counted_of(PyObject* self) {
  return reinterpret_cast<CountedRecipe*>(self);
}

// The managed storage of a packed view. Null with a Python error set.
Reference managed_of(PyObject* view) {
  return Reference::stolen(PyObject_GetAttr(view, operand_managed));
}

// One more use of the storage of this view will come, or one fewer. Returns false with a Python error set.
bool count_view(PyObject* view, long more) {
  const Reference managed = managed_of(view);
  std::int64_t views = 0;
  if (!managed || !as_number(Reference::stolen(PyObject_GetAttr(managed.get(), managed_views)), views)) {
    return false;
  }
  const Reference now = Reference::stolen(PyLong_FromLongLong(views + more));
  return now && PyObject_SetAttr(managed.get(), managed_views, now.get()) == 0;
}

// The same for a save of the gate, which Python may have by now.
bool count_light(PyObject* object, long more) {
  if (!is_light_save(object)) {
    PyErr_SetString(PyExc_TypeError, "expected a save that the gate moves among the light operands of a recipe");
    return false;
  }
  auto* save = reinterpret_cast<LightSave*>(object);
  if (save->full != nullptr) {
    return count_view(save->full, more);
  }
  save->storage->more_uses += more;
  return true;
}

bool count_one(const CountedRecipe* counted, Py_ssize_t index, long more) {
  const Py_ssize_t views = PyTuple_GET_SIZE(counted->operands);
  return index < views ? count_view(PyTuple_GET_ITEM(counted->operands, index), more)
                       : count_light(PyTuple_GET_ITEM(counted->light, index - views), more);
}

PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject* keywords) {
  if (PyTuple_GET_SIZE(arguments) != 1 || (keywords != nullptr && PyDict_GET_SIZE(keywords) != 0)) {
    PyErr_SetString(PyExc_TypeError, "expected a recipe");
    return nullptr;
  }
  PyObject* recipe = PyTuple_GET_ITEM(arguments, 0);
  Reference operands = Reference::stolen(PyObject_GetAttr(recipe, recipe_operands));
  operands = operands ? Reference::stolen(PySequence_Tuple(operands.get())) : Reference();
  Reference light = operands ? Reference::stolen(PyObject_GetAttr(recipe, recipe_light)) : Reference();
  light = light ? Reference::stolen(PySequence_Tuple(light.get())) : Reference();
  CountedRecipe* counted = light ? counted_of(type->tp_alloc(type, 0)) : nullptr;  // zeroed
  if (counted == nullptr) {
    return nullptr;
  }
  counted->recipe = Py_NewRef(recipe);
  counted->operands = operands.release();
  counted->light = light.release();
  const Py_ssize_t all = PyTuple_GET_SIZE(counted->operands) + PyTuple_GET_SIZE(counted->light);
  for (; counted->counted < all; ++counted->counted) {
    if (!count_one(counted, counted->counted, 1)) {
      Py_DECREF(counted);
      return nullptr;
    }
  }
  return reinterpret_cast<PyObject*>(counted);
}

// Counts no use any more, and forgets the recipe.
int clear(PyObject* self) {
  CountedRecipe* counted = counted_of(self);
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  while (counted->counted > 0) {
    if (!count_one(counted, --counted->counted, -1)) {
      PyErr_WriteUnraisable(nullptr);
    }
  }
  PyErr_Restore(type, value, trace);
  Py_CLEAR(counted->light);
  Py_CLEAR(counted->operands);
  Py_CLEAR(counted->recipe);
  return 0;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(counted_of(self)->recipe);
  Py_VISIT(counted_of(self)->operands);
  Py_VISIT(counted_of(self)->light);
  return 0;
}

void dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  clear(self);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// True if something that it reads has to be recomputed first.
PyObject* needs_recomputes(PyObject* self, void*) {
  const CountedRecipe* counted = counted_of(self);
  if (counted->recipe == nullptr) {
    Py_RETURN_FALSE;  // cleared, with the cycle that held it
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(counted->light); ++index) {
    if (is_missing(reinterpret_cast<LightSave*>(PyTuple_GET_ITEM(counted->light, index))->storage)) {
      Py_RETURN_TRUE;
    }
  }
  for (Py_ssize_t index = 0; index < PyTuple_GET_SIZE(counted->operands); ++index) {
    const Reference managed = managed_of(PyTuple_GET_ITEM(counted->operands, index));
    const Reference missing =
        managed ? Reference::stolen(PyObject_GetAttr(managed.get(), must_be_recomputed)) : Reference();
    const int is_true = missing ? PyObject_IsTrue(missing.get()) : -1;
    if (is_true != 0) {
      return is_true < 0 ? nullptr : Py_NewRef(Py_True);
    }
  }
  Py_RETURN_FALSE;
}

PyMemberDef members[] = {
    {"recipe", T_OBJECT_EX, offsetof(CountedRecipe, recipe), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyGetSetDef properties[] = {
    {"needs_recomputes", needs_recomputes, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(&make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(&dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(&traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(&clear)},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {0, nullptr},
};
PyType_Spec spec = {"vdnn._C.CountedRecipe", sizeof(CountedRecipe), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

bool add_counted_recipe(PyObject* module) {
  recipe_operands = PyUnicode_InternFromString("operands");
  recipe_light = PyUnicode_InternFromString("light_operands");
  operand_managed = PyUnicode_InternFromString("managed");
  managed_views = PyUnicode_InternFromString("views");
  must_be_recomputed = PyUnicode_InternFromString("must_be_recomputed");
  if (recipe_operands == nullptr || recipe_light == nullptr || operand_managed == nullptr || managed_views == nullptr ||
      must_be_recomputed == nullptr) {
    return false;
  }
  const Reference type = Reference::stolen(PyType_FromSpec(&spec));
  return type && PyObject_SetAttrString(module, "CountedRecipe", type.get()) == 0;
}

}  // namespace vdnn::hooks
