/* crc.c - CRC-32C by table on any CPU, and by the SSE 4.2 instruction on three streams at a time.
 *
 * The instruction has a latency of three cycles and a throughput of one per cycle, so three
 * independent streams keep it busy. To combine their sums, each is shifted past the bytes that
 * follow its stream: a multiplication by x^(8 * bytes) modulo the polynomial. */
#include "base/crc.h"

#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define POLYNOMIAL 0x82F63B78u

static uint32_t table[256];
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* Appends one zero bit: multiplies by x. */
static uint32_t times_x(uint32_t c)
{
    return (c & 1) ? (c >> 1) ^ POLYNOMIAL : c >> 1;
}

static uint32_t by_table(uint32_t crc, const uint8_t *p, size_t len)
{
    while (len--)
        crc = table[(crc ^ *p++) & 0xFF] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__)

#define STREAM ((size_t)1024) /* bytes per stream; a multiple of 8 */

static uint32_t past_one, past_two; /* shift a sum past one stream, past two */
static int has_instruction;

/* Returns x^(8 * bytes - 33). The product of two reflected numbers is one bit short, and taking its
 * CRC multiplies by x^32. */
static uint32_t shift_factor(size_t bytes)
{
    uint32_t c = 0x80000000u; /* 1 */
    for (size_t i = 0; i < 8 * bytes - 33; i++)
        c = times_x(c);
    return c;
}

static uint64_t load8(const uint8_t *p)
{
    uint64_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

__attribute__((target("sse4.2,pclmul"))) static uint64_t multiply(uint32_t a, uint32_t b)
{
    __m128i product = _mm_clmulepi64_si128(_mm_cvtsi32_si128((int)a), _mm_cvtsi32_si128((int)b), 0);
    return (uint64_t)_mm_cvtsi128_si64(product);
}

__attribute__((target("sse4.2,pclmul"))) static uint32_t
by_instruction(uint32_t crc, const uint8_t *p, size_t len)
{
    for (; len >= 3 * STREAM; len -= 3 * STREAM, p += 3 * STREAM) {
        uint64_t a = crc, b = 0, c = 0;
        for (size_t i = 0; i < STREAM; i += 8) {
            a = _mm_crc32_u64(a, load8(p + i));
            b = _mm_crc32_u64(b, load8(p + STREAM + i));
            c = _mm_crc32_u64(c, load8(p + 2 * STREAM + i));
        }
        uint64_t shifted = multiply((uint32_t)a, past_two) ^ multiply((uint32_t)b, past_one);
        crc = (uint32_t)(c ^ _mm_crc32_u64(0, shifted));
    }
    for (; len >= 8; len -= 8, p += 8)
        crc = (uint32_t)_mm_crc32_u64(crc, load8(p));
    for (; len; len--, p++)
        crc = _mm_crc32_u8(crc, *p);
    return crc;
}

static void detect_instruction(void)
{
    past_one = shift_factor(STREAM);
    past_two = shift_factor(2 * STREAM);
    __builtin_cpu_init();
    has_instruction = __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul");
}

#else

enum { has_instruction = 0 };

static uint32_t by_instruction(uint32_t crc, const uint8_t *p, size_t len)
{
    return by_table(crc, p, len);
}

static void detect_instruction(void)
{
}

#endif

static void build(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = times_x(c);
        table[i] = c;
    }
    detect_instruction();
}

uint32_t nbi_crc32c_scalar(uint32_t crc, const void *bytes, size_t len)
{
    pthread_once(&once, build);
    return ~by_table(~crc, bytes, len);
}

uint32_t nbi_crc32c(uint32_t crc, const void *bytes, size_t len)
{
    pthread_once(&once, build);
    return has_instruction ? ~by_instruction(~crc, bytes, len) : ~by_table(~crc, bytes, len);
}
