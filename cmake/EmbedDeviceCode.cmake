# Compiles csrc/codec/kernels.cu with nvcc and embeds the result in a target, or says in it why there is none.
#
#   vdnn_embed_device_code(target)   adds embedded_device_code() and device_code_missing_reason() to the target
#   -DVDNN_NVCC=/path/of/nvcc        uses this one; OFF builds without; empty (the default) looks for it
#
# No CUDA language is enabled: a machine without nvcc, or with one too old for our targets, builds all the same.
# Once nvcc has compiled a trivial kernel with our flags, an error in kernels.cu is an error of the build.

set(VDNN_NVCC "" CACHE STRING "Path of nvcc; OFF builds without device code; empty looks for it")

# One cubin for each generation that we measure on, and PTX for every other from compute capability 7.5 up.
set(_vdnn_nvcc_flags
    -fatbin -O3 -std=c++17
    -gencode arch=compute_80,code=sm_80
    -gencode arch=compute_90,code=sm_90
    -gencode arch=compute_75,code=compute_75)

function(_vdnn_find_nvcc nvcc_out reason_out)
  set(${nvcc_out} "" PARENT_SCOPE)
  if(VDNN_NVCC AND EXISTS "${VDNN_NVCC}")
    set(${nvcc_out} "${VDNN_NVCC}" PARENT_SCOPE)
    return()
  elseif(VDNN_NVCC)
    message(FATAL_ERROR "VDNN_NVCC is ${VDNN_NVCC}, which does not exist. Give nvcc's full path, or OFF, or nothing.")
  elseif(NOT VDNN_NVCC STREQUAL "")
    set(${reason_out} "built with VDNN_NVCC=${VDNN_NVCC}: build again with nvcc" PARENT_SCOPE)
    return()
  endif()
  set(hints "")
  foreach(variable IN ITEMS CUDA_HOME CUDA_PATH)
    if(NOT "$ENV{${variable}}" STREQUAL "")
      list(APPEND hints "$ENV{${variable}}/bin")
    endif()
  endforeach()
  # Looked up anew each time: a toolkit may have come or gone since the last configure.
  unset(_vdnn_nvcc_program CACHE)
  # PATH and the hints only: CMake's own list has /usr/local/bin, whatever PATH says.
  find_program(_vdnn_nvcc_program nvcc HINTS ${hints} NO_CMAKE_SYSTEM_PATH)
  mark_as_advanced(_vdnn_nvcc_program)
  if(_vdnn_nvcc_program)
    set(${nvcc_out} "${_vdnn_nvcc_program}" PARENT_SCOPE)
  else()
    set(${reason_out} "built without nvcc: install the CUDA toolkit and build again" PARENT_SCOPE)
  endif()
endfunction()

# Whether this nvcc takes our flags on a kernel that cannot be wrong. Only a success is remembered.
function(_vdnn_try_nvcc nvcc works_out reason_out)
  execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE version ERROR_VARIABLE version RESULT_VARIABLE ignored)
  string(MD5 identity "${nvcc} ${version} ${_vdnn_nvcc_flags}")
  set(${works_out} TRUE PARENT_SCOPE)
  if(VDNN_NVCC_KNOWN_TO_WORK STREQUAL identity)
    return()
  endif()
  set(trial "${CMAKE_CURRENT_BINARY_DIR}/vdnn_nvcc_trial")
  file(WRITE "${trial}.cu" "#include <cstdint>\nextern \"C\" __global__ void trial(std::uint64_t* p) { *p = 1; }\n")
  execute_process(COMMAND "${nvcc}" ${_vdnn_nvcc_flags} -o "${trial}.fatbin" "${trial}.cu"
                  RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(result EQUAL 0)
    set(VDNN_NVCC_KNOWN_TO_WORK "${identity}" CACHE INTERNAL "The nvcc that passed the trial")
    return()
  endif()
  set(${works_out} FALSE PARENT_SCOPE)
  string(REGEX MATCH "[^\n]*(fatal|error)[^\n]*" complaint "${output}")
  string(STRIP "${complaint}" complaint)
  set(${reason_out} "built without device code: ${nvcc} fails on a trivial kernel (${complaint}): install a newer \
CUDA toolkit and build again" PARENT_SCOPE)
endfunction()

function(_vdnn_compile_device_code nvcc fatbin_out)
  # nvcc does not escape spaces in the depfile's target, so the output is named relative to the working directory.
  set(name vdnn_device_code.fatbin)
  set(kernels "${PROJECT_SOURCE_DIR}/csrc/codec/kernels.cu")
  if(POLICY CMP0116)
    cmake_policy(SET CMP0116 NEW)
  endif()
  add_custom_command(
    OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/${name}"
    COMMAND "${nvcc}" ${_vdnn_nvcc_flags} "-I${PROJECT_SOURCE_DIR}/csrc"
            -MD -MF ${name}.d -MT ${name} -o ${name} "${kernels}"
    DEPENDS "${kernels}" "${nvcc}"
    DEPFILE "${CMAKE_CURRENT_BINARY_DIR}/${name}.d"
    WORKING_DIRECTORY "${CMAKE_CURRENT_BINARY_DIR}"
    COMMENT "Compiling device code with ${nvcc}"
    VERBATIM)
  set(${fatbin_out} "${CMAKE_CURRENT_BINARY_DIR}/${name}" PARENT_SCOPE)
endfunction()

function(vdnn_embed_device_code target)
  set(reason "")
  _vdnn_find_nvcc(nvcc reason)
  set(works FALSE)
  if(nvcc)
    _vdnn_try_nvcc("${nvcc}" works reason)
  endif()
  set(source "${CMAKE_CURRENT_BINARY_DIR}/embedded_device_code.cpp")
  set(VDNN_DEVICE_CODE_PRESENT 0)
  set(VDNN_DEVICE_CODE_FILE "")
  set(VDNN_DEVICE_CODE_MISSING_REASON "${reason}")
  if(works)
    _vdnn_compile_device_code("${nvcc}" fatbin)
    set(VDNN_DEVICE_CODE_PRESENT 1)
    # Quoted for the assembler's .incbin "...".
    string(REGEX REPLACE "([\\\"])" "\\\\\\1" VDNN_DEVICE_CODE_FILE "${fatbin}")
    set_source_files_properties("${source}" PROPERTIES OBJECT_DEPENDS "${fatbin}")
    message(STATUS "vdnn: device code by ${nvcc}")
  else()
    message(STATUS "vdnn: no device code: ${reason}")
  endif()
  configure_file("${CMAKE_CURRENT_FUNCTION_LIST_DIR}/embedded_device_code.cpp.in" "${source}" @ONLY)
  target_sources(${target} PRIVATE "${source}")
endfunction()
