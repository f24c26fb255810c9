/* test_linear_fp4.c - linear of prefill on FP4 tensor cores, against the scalar CPU code with the
 * same x, the sum of two NVFP4 values. */
#include "linear_lab.h"

static void check_case(int64_t N, int64_t K, int variant)
{
    static const int64_t outs[][3] = {{4, 40, 132}, {516, 16, 200}, {128, 256, 36}};
    static const float magnitudes[] = {1, 30, 1e-3f, 0, 1e4f};
    struct linear_case c = {.count = 1 + variant % 3, .add = variant / 3 % 2};
    linear_new(&c, N, K, outs[variant % 3]);
    for (int i = 0; i < c.count; i++) /* the second one needs x in bf16 */
        host_weight_new(&c.w[i], i == 1 ? NBI_BF16 : NBI_NVFP4, outs[variant % 3][i], K);
    for (int64_t i = 0; i < N * K; i++)
        c.x[i] *= magnitudes[i / K % 5];
    if (variant % 2)
        spread_scales(&c.w[0]);
    if (variant % 4 == 3)
        c.x[3 * K + 7] = NAN; /* must not leave its row */
    snprintf(where, sizeof where, "two terms, %d matrices, N %lld, K %lld%s", c.count, (long long)N,
             (long long)K, c.add ? ", added" : "");
    check_product(&c);
    linear_free(&c);
}

static void test_linear_fp4__multiplies_the_values_of_the_codec(void **state)
{
    static const int64_t counts[] = {65, 128, 130, 300}, widths[] = {16, 80, 144, 1008, 2560};
    const struct nbi_stream_limits prefill = {.N = 65, .K = 16, .D = 2, .heads = 1};
    struct lab l;
    (void)state;
    begin_on("cuda");
    lab_begin(&l, tested, &prefill); /* runs the self-test */
    lab_end(&l);
    if (!nbi_backend_has(tested, NBI_CAP_FP4) && !tested->fp4_selftest_failed) {
        end_on();
        skip("FP4 tensor cores need compute capability 10.0");
    }
    if (tested->fp4_selftest_failed)
        fail_msg("%s", tested->prefill_path);
    for (int i = 0; i < 20; i++)
        check_case(counts[i % 4], widths[i / 4], i);
    end_on();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear_fp4__multiplies_the_values_of_the_codec),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
