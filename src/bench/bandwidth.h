/* bandwidth.h - measures the read bandwidth of host memory. */
#pragma once

/* Bytes per second of all threads together, best of several rounds; 0 when out of memory. */
double nbi_read_bandwidth(int threads);

/* The same in two steps, for repeated measurements. nbi_bandwidth_new returns a buffer that exceeds
 * the caches, which the caller frees; NULL when out of memory. nbi_bandwidth_now measures with it.
 */
void *nbi_bandwidth_new(void);
double nbi_bandwidth_now(const void *buf, int threads);
