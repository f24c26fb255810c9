/* empty.cpp - CMake wants a target whose headers are precompiled to have a source. */
