/* empty.c - the one source of libnibble.so, which is otherwise the objects of libnibble.a: CMake
 * wants a library to have a source. */
typedef int nb_nothing;
