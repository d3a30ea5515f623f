// One function per part of the core: each adds its classes to the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace vdnn {

void bind_errors(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_sim_table(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_transfer(pybind11::module_& module);
void bind_parked(pybind11::module_& module);
void bind_codec(pybind11::module_& module);
void bind_planning(pybind11::module_& module);
void bind_training(pybind11::module_& module);
void bind_hooks(pybind11::module_& module);

}  // namespace vdnn
