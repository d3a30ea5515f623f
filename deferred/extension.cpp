// The extension as one unit of translation: torch's headers take longer to read than all of these.

#include "accelerator.cpp"
#include "arguments.cpp"
#include "autocast.cpp"
#include "deferred_call.cpp"
#include "module.cpp"
#include "operations.cpp"
#include "shape_memory.cpp"
#include "storage.cpp"
#include "stream_ordered_memory.cpp"
