/* bandwidth.h - how fast memory can be read here. */
#pragma once

/* Bytes per second of all threads together; the best of several rounds. 0 if memory is short. */
double nbi_read_bandwidth(int threads);

/* The same for measuring again and again: memory that is large enough (free it), NULL if there is
 * none, and the rate at which it is read now. */
void *nbi_bandwidth_new(void);
double nbi_bandwidth_now(const void *buf, int threads);
