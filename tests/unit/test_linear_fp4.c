/* test_linear_fp4.c - products of many rows on FP4 tensor cores, beside the scalar code of the CPU
 * on the same x in two terms of four bits. */
#include "linear_lab.h"

static void check_four(int64_t N, int64_t K, int at)
{
    static const int64_t outs[][3] = {{4, 40, 132}, {516, 16, 200}, {128, 256, 36}};
    static const float sizes[] = {1, 30, 1e-3f, 0, 1e4f};
    struct linear_case c = {.count = 1 + at % 3, .add = at / 3 % 2};
    linear_new(&c, N, K, outs[at % 3]);
    for (int i = 0; i < c.count; i++) /* the others between them, which want x in bf16 */
        host_weight_new(&c.w[i], i == 1 ? NBI_BF16 : NBI_NVFP4, outs[at % 3][i], K);
    for (int64_t i = 0; i < N * K; i++)
        c.x[i] *= sizes[i / K % 5];
    if (at % 2)
        spread_scales(&c.w[0]);
    if (at % 4 == 3)
        c.x[3 * K + 7] = NAN; /* stays in its row */
    snprintf(where, sizeof where, "two terms, %d matrices, N %lld, K %lld%s", c.count, (long long)N,
             (long long)K, c.add ? ", added" : "");
    check_product(&c);
    linear_free(&c);
}

static void test_linear_fp4__multiplies_what_the_codec_gives(void **state)
{
    static const int64_t counts[] = {65, 128, 130, 300}, widths[] = {16, 80, 144, 1008, 2560};
    const struct nbi_stream_limits many = {.N = 65, .K = 16, .D = 2, .heads = 1};
    struct lab l;
    (void)state;
    open_both("cuda");
    lab_begin(&l, tested, &many); /* which tries them */
    lab_end(&l);
    if (!tested->fp4 && !tested->fp4_selftest_failed) {
        close_both();
        skip("FP4 tensor cores need compute capability 10.0");
    }
    if (tested->fp4_selftest_failed)
        fail_msg("%s", tested->prefill_path);
    for (int i = 0; i < 20; i++)
        check_four(counts[i % 4], widths[i / 4], i);
    close_both();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear_fp4__multiplies_what_the_codec_gives),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
