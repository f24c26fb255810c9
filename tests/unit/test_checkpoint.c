/* test_checkpoint.c - checkpoints read back as written, any damage is found, and a directory always
 * has an intact checkpoint. */
#include "train/checkpoint.h"

#include <errno.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/str.h"
#include "unit/support.h"

#define BIG ((size_t)5 << 19) /* 2.5 pieces */

static char warnings[8192];

static void keep_warning(void *ctx, enum nb_log_level level, const char *line)
{
    (void)ctx;
    size_t used = strlen(warnings);
    if (level == NB_LOG_WARN)
        snprintf(warnings + used, sizeof warnings - used, "%s\n", line);
}

static int setup(void **state)
{
    warnings[0] = 0;
    nb_log_set_sink(keep_warning, NULL);
    return make_test_dir(state);
}

/* Byte i of blob b at a step. */
static uint8_t pattern(uint64_t step, size_t b, uint64_t i)
{
    return (uint8_t)((i * 2654435761u + step * 40503u + b * 97u) >> 7);
}

static enum nb_status get_pattern(void *ctx, size_t index, uint64_t offset, void *dst, size_t len)
{
    for (size_t i = 0; i < len; i++)
        ((uint8_t *)dst)[i] = pattern(*(uint64_t *)ctx, index, offset + i);
    return NB_OK;
}

static enum nb_status save(const char *dir, int keep, uint64_t step, size_t bytes)
{
    const struct nbi_ckpt_value values[] = {nbi_ckpt_int("cursor", -(int64_t)step),
                                            nbi_ckpt_real("loss", 0.5 + (double)step)};
    const struct nbi_ckpt_blob blobs[] = {
        {"w", bytes, NULL}, {"empty", 0, NULL}, {"text", 5, "hello"}, {"m", bytes / 2 + 1, NULL}};
    const struct nbi_ckpt_content content = {.step = step,
                                             .settings = "{\"lr\": 0.1}",
                                             .values = values,
                                             .value_count = 2,
                                             .blobs = blobs,
                                             .blob_count = 4,
                                             .get = get_pattern,
                                             .ctx = &step};
    return nbi_checkpoint_save(dir, keep, &content);
}

static enum nb_status count_bytes(void *ctx, uint64_t offset, const void *src, size_t len)
{
    uint64_t *sum = ctx;
    assert_true(offset == *sum);
    assert_non_null(src);
    *sum += len;
    return NB_OK;
}

static void check_blob(const struct nbi_checkpoint *c, size_t index)
{
    struct nbi_ckpt_blob b = nbi_checkpoint_blob(c, index);
    uint8_t *bytes = malloc(b.bytes);
    assert_non_null(bytes);
    assert_ok(nbi_checkpoint_read(c, b.name, bytes, b.bytes));
    for (uint64_t i = 0; i < b.bytes; i++)
        if (bytes[i] != pattern(nbi_checkpoint_step(c), index, i))
            fail_msg("byte %llu of '%s' is wrong", (unsigned long long)i, b.name);
    free(bytes);
}

static void test_checkpoint__round_trip(void **state)
{
    (void)state;
    struct nbi_checkpoint *c;
    char text[8];
    int64_t cursor;
    double loss;
    uint64_t sum = 0;
    assert_ok(save(test_path("new"), 3, 120, BIG)); /* makes the directory */
    assert_true(nbi_path_is_file(test_path("new/step-00000120.ckpt")));
    assert_ok(nbi_checkpoint_latest(&c, test_path("new")));
    assert_int_equal(nbi_checkpoint_step(c), 120);
    assert_string_equal(nbi_checkpoint_settings(c), "{\"lr\": 0.1}");
    assert_ok(nbi_checkpoint_int(c, "cursor", &cursor));
    assert_int_equal(cursor, -120);
    assert_ok(nbi_checkpoint_real(c, "loss", &loss));
    assert_true(loss == 120.5);
    assert_fails(nbi_checkpoint_int(c, "loss", &cursor), NB_EFORMAT, "no whole number 'loss'");
    assert_fails(nbi_checkpoint_real(c, "x", &loss), NB_EFORMAT, "no real number 'x'");
    assert_int_equal(nbi_checkpoint_blob_count(c), 4);
    assert_ok(nbi_checkpoint_read(c, "text", text, 5));
    assert_memory_equal(text, "hello", 5);
    assert_ok(nbi_checkpoint_read(c, "empty", NULL, 0));
    assert_fails(nbi_checkpoint_read(c, "text", text, 6), NB_EFORMAT, "has 5 bytes, 6 expected");
    assert_fails(nbi_checkpoint_read(c, "none", text, 1), NB_EFORMAT, "no blob 'none'");
    check_blob(c, 0);
    check_blob(c, 3);
    assert_ok(nbi_checkpoint_stream(c, "w", BIG, count_bytes, &sum));
    assert_int_equal(sum, BIG);
    nbi_checkpoint_close(c);
}

/* A file from tests/fuzz/make_checkpoint.py, which was written from docs/FORMATS.md alone. */
static void test_checkpoint__reads_a_file_of_another_writer(void **state)
{
    (void)state;
    struct nbi_checkpoint *c;
    int64_t v;
    double real;
    char bytes[3];
    assert_ok(nbi_checkpoint_open(&c, NB_TEST_SOURCE "/fuzz/corpus/checkpoint/plain.ckpt"));
    assert_ok(nbi_checkpoint_verify(c));
    assert_int_equal(nbi_checkpoint_step(c), 7);
    assert_string_equal(nbi_checkpoint_settings(c), "{\"seed\": 1}");
    assert_ok(nbi_checkpoint_int(c, "cursor", &v));
    assert_int_equal(v, -2);
    assert_ok(nbi_checkpoint_real(c, "nan", &real));
    assert_true(isnan(real));
    assert_ok(nbi_checkpoint_read(c, "abc", bytes, 3));
    assert_memory_equal(bytes, "abc", 3);
    nbi_checkpoint_close(c);
}

static void test_checkpoint__invalid_content_is_refused(void **state)
{
    (void)state;
    const struct nbi_ckpt_blob same[] = {{"a", 1, "x"}, {"b", 1, "y"}, {"a", 1, "z"}};
    const struct nbi_ckpt_blob huge[] = {{"a", UINT64_MAX, "x"}, {"b", 1, "y"}};
    const struct nbi_ckpt_blob bare[] = {{"a", 1, NULL}}, unprintable[] = {{"a\n", 1, "x"}};
    struct nbi_ckpt_content c = {.settings = "{}", .blobs = same, .blob_count = 3};
    assert_fails(nbi_checkpoint_save(test_dir, 1, &c), NB_EINVAL, "'a' occurs twice");
    c.blobs = huge, c.blob_count = 2;
    assert_fails(nbi_checkpoint_save(test_dir, 1, &c), NB_EINVAL, "2^63");
    c.blobs = bare, c.blob_count = 1;
    assert_fails(nbi_checkpoint_save(test_dir, 1, &c), NB_EINVAL, "'a' has no bytes");
    c.blobs = unprintable;
    assert_fails(nbi_checkpoint_save(test_dir, 1, &c), NB_EINVAL, "not printable");
    c.blob_count = 0, c.settings = "{";
    assert_fails(nbi_checkpoint_save(test_dir, 1, &c), NB_EFORMAT, "settings of a checkpoint");
    assert_fails(save(test_path("no/such"), 1, 1, 8), NB_EIO, "cannot make directory");
    assert_true(nbi_dir_is_empty(test_dir));
}

/* ---- damage ---- */

static char *small_file(size_t *len)
{
    char *bytes;
    assert_ok(save(test_dir, 1, 3, 40));
    assert_ok(nbi_file_read(test_path("step-00000003.ckpt"), 100000, &bytes, len));
    return bytes;
}

static enum nb_status open_all(const void *bytes, size_t len)
{
    struct nbi_checkpoint *c;
    uint8_t *exact =
        malloc(len ? len : 1); /* exact size, so that sanitizers find reads past the end */
    assert_non_null(exact);
    memcpy(exact, bytes, len);
    enum nb_status rc = nbi_checkpoint_open_memory(&c, exact, len);
    if (rc == NB_OK)
        rc = nbi_checkpoint_verify(c);
    nbi_checkpoint_close(c);
    free(exact);
    return rc;
}

static void test_checkpoint__every_truncation_is_found(void **state)
{
    (void)state;
    size_t len;
    char *bytes = small_file(&len);
    assert_ok(open_all(bytes, len));
    for (size_t n = 0; n < len; n++)
        assert_fails(open_all(bytes, n), NB_EFORMAT, "truncated");
    bytes = realloc(bytes, len + 1);
    bytes[len] = 0;
    assert_fails(open_all(bytes, len + 1), NB_EFORMAT, "too long");
    free(bytes);
}

static void test_checkpoint__every_flip_is_found(void **state)
{
    (void)state;
    size_t len;
    char *bytes = small_file(&len);
    for (size_t i = 0; i < len; i++)
        for (int mask = 1; mask < 256; mask += SANITIZED ? 16 : 1) {
            bytes[i] ^= (char)mask;
            if (open_all(bytes, len) != NB_EFORMAT)
                fail_msg("byte %zu of %zu changed by %02x is not found", i, len, (unsigned)mask);
            bytes[i] ^= (char)mask;
        }
    assert_ok(open_all(bytes, len));
    free(bytes);
}

/* Flips one byte of a file; negative offsets count from the end. */
static void damage(const char *name, long at)
{
    FILE *f = fopen(test_path(name), "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, at, at < 0 ? SEEK_END : SEEK_SET), 0);
    int was = fgetc(f);
    assert_int_equal(fseek(f, -1, SEEK_CUR), 0);
    fputc(was ^ 0x10, f);
    assert_int_equal(fclose(f), 0);
}

static void latest_is(uint64_t step)
{
    struct nbi_checkpoint *c;
    assert_ok(nbi_checkpoint_latest(&c, test_dir));
    assert_int_equal(nbi_checkpoint_step(c), step);
    nbi_checkpoint_close(c);
}

static void test_checkpoint__falls_back_to_an_older_one_and_says_why(void **state)
{
    (void)state;
    struct nbi_checkpoint *c;
    assert_fails(nbi_checkpoint_latest(&c, test_path("none")), NB_ENOTFOUND, "cannot read");
    assert_fails(nbi_checkpoint_latest(&c, test_dir), NB_ENOTFOUND, "no checkpoint in");
    for (uint64_t step = 1; step <= 8; step++)
        assert_ok(save(test_dir, 9, step, 1000));
    put("step-9.ckpt", "no name of ours");
    put("step-00000009.ckpt~", "no name of ours");
    latest_is(8);
    assert_string_equal(warnings, "");
    damage("step-00000008.ckpt", 300); /* in blob 'w' */
    damage("step-00000007.ckpt", -1);  /* checksum of the trailer */
    damage("step-00000006.ckpt", 8);   /* version */
    damage("step-00000005.ckpt", 40);  /* counts in the header */
    put("step-00000004.ckpt", "some text");
    assert_int_equal(truncate(test_path("step-00000003.ckpt"), 700), 0);
    assert_int_equal(rename(test_path("step-00000002.ckpt"), test_path("step-00000010.ckpt")), 0);
    latest_is(1);
    assert_non_null(strstr(warnings, "step-00000008.ckpt': bad checksum in blob 'w'; trying"));
    assert_non_null(strstr(warnings, "step-00000007.ckpt': bad checksum in the trailer"));
    assert_non_null(strstr(warnings, "step-00000006.ckpt': wrong version: 17"));
    assert_non_null(strstr(warnings, "step-00000005.ckpt': bad checksum in the header"));
    assert_non_null(strstr(warnings, "step-00000004.ckpt': not a checkpoint"));
    assert_non_null(strstr(warnings, "step-00000003.ckpt': truncated: 700 bytes"));
    assert_non_null(strstr(warnings, "step-00000010.ckpt': it is that of step 2"));
    damage("step-00000001.ckpt", 300);
    assert_fails(nbi_checkpoint_latest(&c, test_dir), NB_EFORMAT, "none of the 8 checkpoints");
    assert_non_null(strstr(nb_last_error(), "step-00000010.ckpt': it is"));
}

static void test_checkpoint__keeps_only_the_last(void **state)
{
    (void)state;
    put(".step-00000001.ckpt.nibble-1-0", "left by a dead writer");
    put(".step-mine", "somebody's");
    for (uint64_t step = 10; step <= 60; step += 10) {
        assert_ok(save(test_dir, 2, step, 100));
        assert_int_equal(nbi_checkpoint_count(test_dir), step == 10 ? 1 : 2);
    }
    assert_int_equal(temporaries(), 0);
    assert_content(".step-mine", "somebody's");
    latest_is(60);
    assert_ok(save(test_dir, 1, 50, 100)); /* later ones stay, and so does the new one */
    assert_int_equal(nbi_checkpoint_count(test_dir), 2);
    assert_ok(save(test_dir, 0, 123456789012, 100));
    assert_int_equal(nbi_checkpoint_count(test_dir), 1);
    latest_is(123456789012);
}

/* ---- killed writers, full disks ---- */

static void write_forever(uint64_t step)
{
    for (;; step++)
        if (save(test_dir, 2, step, BIG) != NB_OK)
            _exit(1);
}

/* The newest checkpoint must be intact and consistently of one step. */
static uint64_t check_latest(void)
{
    struct nbi_checkpoint *c;
    assert_ok(nbi_checkpoint_latest(&c, test_dir));
    uint64_t step = nbi_checkpoint_step(c);
    check_blob(c, 0);
    check_blob(c, 3);
    nbi_checkpoint_close(c);
    return step;
}

static void test_checkpoint__killed_writers_leave_an_intact_checkpoint(void **state)
{
    (void)state;
    uint64_t last = 1;
    int unfinished = 0, there = 1;
    double start = nbi_now();
    assert_ok(save(test_dir, 2, 1, BIG));
    double one = nbi_now() - start;
    for (int kills = 0; kills < 60; kills++) {
        pid_t pid = fork();
        int status;
        assert_true(pid >= 0);
        if (pid == 0)
            write_forever(last + 1);
        usleep((useconds_t)(1e6 * one * 3 * kills / 59));
        assert_int_equal(kill(pid, SIGKILL), 0);
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        uint64_t now = check_latest();
        /* A writer killed before it removed the oldest leaves one more. */
        int count = nbi_checkpoint_count(test_dir);
        assert_true(now >= last && count <= (there < 2 ? 2 : there) + 1);
        there = count;
        assert_true(temporaries() <= 1);
        unfinished += temporaries();
        last = now;
    }
    assert_string_equal(warnings, "");
    assert_ok(save(test_dir, 2, last + 7, BIG));
    assert_int_equal(temporaries(), 0);
    assert_int_equal(nbi_checkpoint_count(test_dir), 2);
    print_message("60 kills: step %llu, %d files unfinished\n", (unsigned long long)last,
                  unfinished);
    assert_true(unfinished > 0);
}

/* Called in a child process: 0 if a save that is too large fails with these words. */
static int refused_by(const char *dir, const char *words)
{
    bool ok = save(dir, 1, 2, (size_t)4 << 20) == NB_EIO && strstr(nb_last_error(), words) &&
              nbi_checkpoint_count(dir) == 1;
    return ok ? 0 : 1;
}

static int limited_child(void)
{
    const struct rlimit limit = {1 << 20, 1 << 20};
    signal(SIGXFSZ, SIG_IGN);
    if (setrlimit(RLIMIT_FSIZE, &limit) != 0)
        return 77;
    return refused_by(test_dir, "File too large");
}

static int full_child(void)
{
    const char *dir = test_path("small");
    if (mkdir(dir, 0777) != 0 || unshare(CLONE_NEWNS) != 0 ||
        mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
        mount("none", dir, "tmpfs", 0, "size=1m") != 0)
        return 77;
    return save(dir, 1, 1, 1000) == NB_OK ? refused_by(dir, "No space left on device") : 1;
}

static void run_child(int (*fn)(void), const char *what)
{
    int status;
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0)
        _exit(fn());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        print_message("SKIP %s: not allowed here\n", what);
    else
        assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_checkpoint__full_disk_keeps_old_checkpoints(void **state)
{
    (void)state;
    assert_ok(save(test_dir, 1, 1, 1000));
    run_child(limited_child, "a limit on file sizes");
    run_child(full_child, "a full tmpfs");
    assert_int_equal(temporaries(), 0);
    latest_is(1);
}

static enum nb_status get_nothing(void *ctx, size_t index, uint64_t offset, void *dst, size_t len)
{
    (void)ctx, (void)index, (void)offset, (void)dst, (void)len;
    return NB_EDEVICE;
}

static void test_checkpoint__failed_callback_leaves_nothing(void **state)
{
    (void)state;
    const struct nbi_ckpt_blob blobs[] = {{"w", 10, NULL}};
    const struct nbi_ckpt_content c = {
        .settings = "{}", .blobs = blobs, .blob_count = 1, .get = get_nothing};
    assert_int_equal(nbi_checkpoint_save(test_dir, 1, &c), NB_EDEVICE);
    assert_true(nbi_dir_is_empty(test_dir));
}

/* One process may write in a directory; the lock ends when that process is killed. */
static void test_checkpoint__second_writer_is_refused(void **state)
{
    (void)state;
    struct nbi_ckpt_lock *lock = NULL, *other = NULL;
    char who[32], byte;
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        if (nbi_checkpoint_lock(&lock, test_dir) != NB_OK || write(ready[1], "x", 1) != 1)
            _exit(1);
        for (;;)
            pause();
    }
    assert_int_equal(read(ready[0], &byte, 1), 1);
    snprintf(who, sizeof who, "process %ld is training", (long)pid);
    assert_fails(nbi_checkpoint_lock(&lock, test_dir), NB_EIO, who);
    assert_null(lock);
    kill(pid, SIGKILL);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    assert_ok(nbi_checkpoint_lock(&lock, test_dir));
    snprintf(who, sizeof who, "process %ld is training", (long)getpid());
    assert_fails(nbi_checkpoint_lock(&other, test_dir), NB_EIO, who);
    nbi_checkpoint_unlock(lock);
    assert_ok(nbi_checkpoint_lock(&other, test_dir));
    nbi_checkpoint_unlock(other);
    nbi_checkpoint_unlock(NULL);
    assert_fails(nbi_checkpoint_lock(&lock, test_path("none")), NB_EIO, "cannot write");
    close(ready[0]);
    close(ready[1]);
}

/* Pieces of w, the blob with the given bytes, from a slow source; the one at `bad` fails. */
struct slow_source {
    uint64_t step, bad;
};

static enum nb_status get_slowly(void *ctx, size_t index, uint64_t offset, void *dst, size_t len)
{
    struct slow_source *s = ctx;
    if (index == 1 && s->bad > offset && s->bad <= offset + len)
        return nbi_fail(NB_EDEVICE, "byte %llu is lost", (unsigned long long)s->bad);
    usleep(200);
    return get_pattern(&s->step, index, offset, dst, len);
}

static enum nb_status write_from(struct slow_source *s, size_t bytes, bool overlap,
                                 const char *name)
{
    const struct nbi_ckpt_blob blobs[] = {{"text", 5, "hello"}, {"w", bytes, NULL}, {"m", 7, NULL}};
    const struct nbi_ckpt_content content = {.settings = "{}",
                                             .blobs = blobs,
                                             .blob_count = 3,
                                             .get = get_slowly,
                                             .ctx = s,
                                             .overlap = overlap};
    return nbi_checkpoint_write(test_path(name), &content);
}

/* A second thread that fetches makes the same file, and its failures are the writer's. */
static void test_checkpoint__pieces_are_fetched_while_others_are_written(void **state)
{
    (void)state;
    const size_t MiB = 1 << 20, sizes[] = {0, 1, MiB - 1, MiB, MiB + 1, BIG, 4 * MiB};
    struct slow_source good = {.step = 3};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        char *one = NULL, *two = NULL;
        size_t n = 0, m = 0;
        assert_ok(write_from(&good, sizes[i], false, "one"));
        assert_ok(write_from(&good, sizes[i], true, "two"));
        assert_ok(nbi_file_read(test_path("one"), 16 * MiB, &one, &n));
        assert_ok(nbi_file_read(test_path("two"), 16 * MiB, &two, &m));
        assert_int_equal(n, m);
        assert_memory_equal(one, two, n);
        free(one);
        free(two);
    }
    for (size_t i = 0; i < 5; i++) {
        struct slow_source bad = {.step = 3, .bad = i * MiB / 2 + 1};
        assert_fails(write_from(&bad, BIG, true, "bad"), NB_EDEVICE, "blob 'w': byte ");
        assert_int_not_equal(access(test_path("bad"), F_OK), 0);
    }
}

int main(void)
{
#define T(fn) cmocka_unit_test_setup_teardown(fn, setup, remove_test_dir)
    const struct CMUnitTest tests[] = {
        T(test_checkpoint__round_trip),
        T(test_checkpoint__reads_a_file_of_another_writer),
        T(test_checkpoint__invalid_content_is_refused),
        T(test_checkpoint__every_truncation_is_found),
        T(test_checkpoint__every_flip_is_found),
        T(test_checkpoint__falls_back_to_an_older_one_and_says_why),
        T(test_checkpoint__keeps_only_the_last),
        T(test_checkpoint__killed_writers_leave_an_intact_checkpoint),
        T(test_checkpoint__full_disk_keeps_old_checkpoints),
        T(test_checkpoint__failed_callback_leaves_nothing),
        T(test_checkpoint__second_writer_is_refused),
        T(test_checkpoint__pieces_are_fetched_while_others_are_written),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
