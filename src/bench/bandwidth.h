/* bandwidth.h - how fast memory can be read here. */
#pragma once

/* Bytes per second of all threads together; the best of several rounds. 0 if memory is short. */
double nbi_read_bandwidth(int threads);
