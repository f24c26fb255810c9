/* crc.h - CRC-32C (Castagnoli, reflected, as in iSCSI and ext4). Detects every error burst of up to
 * 32 bits, hence any single damaged byte. */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Start with crc = 0; pass consecutive pieces in order. */
uint32_t nbi_crc32c(uint32_t crc, const void *bytes, size_t len);

/* The table-driven reference, one byte at a time. Runs on CPUs without the instruction. */
uint32_t nbi_crc32c_scalar(uint32_t crc, const void *bytes, size_t len);
