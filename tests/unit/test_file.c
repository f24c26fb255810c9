/* test_file.c - sources, cursors, output files. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "unit/support.h"

static void test_source__reads_exactly_or_fails(void **state)
{
    (void)state;
    struct nbi_source *src;
    char buf[8] = "";
    put("a", "0123456789");
    assert_ok(nbi_source_open(&src, test_path("a")));
    assert_int_equal(nbi_source_size(src), 10);
    assert_ok(nbi_source_read(src, 7, buf, 3));
    assert_string_equal(buf, "789");
    assert_ok(nbi_source_read(src, 10, buf, 0));
    assert_fails(nbi_source_read(src, 8, buf, 3), NB_EFORMAT, "wanted");
    assert_fails(nbi_source_read(src, UINT64_MAX, buf, 1), NB_EFORMAT, "wanted");
    nbi_source_close(src);
}

static void test_source__a_shrinking_file_is_an_error(void **state)
{
    (void)state;
    struct nbi_source *src;
    char buf[8];
    put("s", "0123456789");
    assert_ok(nbi_source_open(&src, test_path("s")));
    assert_int_equal(truncate(test_path("s"), 4), 0);
    assert_fails(nbi_source_read(src, 2, buf, 8), NB_EIO, "became shorter");
    nbi_source_close(src);
}

static void test_source__opens_only_regular_files(void **state)
{
    (void)state;
    struct nbi_source *src;
    assert_int_equal(mkfifo(test_path("fifo"), 0600), 0);
    assert_fails(nbi_source_open(&src, test_path("fifo")), NB_EIO, "not a regular file");
    assert_fails(nbi_source_open(&src, test_dir), NB_EIO, "not a regular file");
    assert_fails(nbi_source_open(&src, "/dev/null"), NB_EIO, "not a regular file");
    assert_fails(nbi_source_open(&src, test_path("none")), NB_ENOTFOUND, "No such file");
}

static void test_cursor__reads_numbers_within_bounds(void **state)
{
    (void)state;
    static const uint8_t bytes[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0x80, 0xA3, 0x09, 0x7F};
    struct nbi_source *src;
    struct nbi_cursor c;
    uint32_t a;
    uint64_t b, n;
    assert_ok(nbi_source_memory(&src, bytes, sizeof bytes));
    nbi_cursor_init(&c, src);
    assert_ok(nbi_cursor_u32(&c, &a));
    assert_int_equal(a, 0x04030201);
    assert_ok(nbi_cursor_u64(&c, &b));
    assert_true(b == 0x0C0B0A0908070605ull);
    assert_ok(nbi_cursor_uleb(&c, &n));
    assert_int_equal(n, 151936); /* Qwen3's vocabulary size, as in a real .dat */
    assert_fails(nbi_cursor_skip(&c, 2), NB_EFORMAT, "ends early");
    assert_ok(nbi_cursor_uleb(&c, &n));
    assert_int_equal(n, 127);
    assert_fails(nbi_cursor_u32(&c, &a), NB_EFORMAT, "0 left");
    nbi_source_close(src);
}

static void test_cursor__window_is_invisible(void **state)
{
    (void)state;
    enum { N = 20000 };
    uint8_t *bytes = malloc(N), got[5000];
    struct nbi_source *src;
    struct nbi_cursor c;
    for (int i = 0; i < N; i++)
        bytes[i] = (uint8_t)(i * 7 + i / 256);
    assert_ok(nbi_source_memory(&src, bytes, N));
    nbi_cursor_init(&c, src);
    for (size_t at = 0, n = 1; at + n <= N; at += n, n = n * 5 % 4999 + 1) {
        if (n % 3 == 0) {
            assert_ok(nbi_cursor_skip(&c, n));
            continue;
        }
        assert_ok(nbi_cursor_bytes(&c, got, n));
        assert_memory_equal(got, bytes + at, n);
    }
    nbi_source_close(src);
    free(bytes);
}

static void test_cursor__uleb_refuses_overlong_encodings(void **state)
{
    (void)state;
    static const struct {
        uint8_t bytes[12];
        size_t len;
        const char *words;
    } bad[] = {
        {{0x80, 0x00}, 2, "needless"},
        {{0x80}, 1, "ends early"},
        {{0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x02}, 10, "64 bits"},
        {{0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01}, 11, "64 bits"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct nbi_source *src;
        struct nbi_cursor c;
        uint64_t v;
        assert_ok(nbi_source_memory(&src, bad[i].bytes, bad[i].len));
        nbi_cursor_init(&c, src);
        assert_fails(nbi_cursor_uleb(&c, &v), NB_EFORMAT, bad[i].words);
        nbi_source_close(src);
    }
}

static void test_outfile__target_changes_at_commit_only(void **state)
{
    (void)state;
    struct nbi_outfile *f;
    put("t", "old");
    assert_int_equal(chmod(test_path("t"), 0640), 0);
    assert_ok(nbi_outfile_open(&f, test_path("t")));
    assert_ok(nbi_outfile_reserve(f, 6));
    assert_ok(nbi_outfile_write(f, 3, "new", 3));
    assert_ok(nbi_outfile_write(f, 0, "the", 3));
    assert_content("t", "old");
    assert_int_equal(temporaries(), 1);
    assert_ok(nbi_outfile_commit(f));
    assert_content("t", "thenew");
    struct stat st;
    assert_int_equal(stat(test_path("t"), &st), 0);
    assert_int_equal(st.st_mode & 0777, 0640);
    assert_ok(nbi_outfile_open(&f, test_path("t")));
    assert_ok(nbi_outfile_write(f, 0, "junk", 4));
    nbi_outfile_abort(f);
    assert_content("t", "thenew");
    assert_int_equal(temporaries(), 0);
}

static void test_outfile__writes_through_a_link(void **state)
{
    (void)state;
    put("real", "old");
    assert_int_equal(symlink("real", test_path("link")), 0);
    put("link", "new");
    assert_content("real", "new");
    struct stat st;
    assert_int_equal(lstat(test_path("link"), &st), 0);
    assert_true(S_ISLNK(st.st_mode));
}

static void test_outfile__removes_leftovers_of_dead_writers(void **state)
{
    (void)state;
    put(".t2.nibble-999-0", "half");
    int live = open(test_path(".t2.nibble-998-0"), O_CREAT | O_RDWR, 0600);
    assert_true(live >= 0);
    assert_int_equal(flock(live, LOCK_EX), 0);
    put("t2", "x");
    assert_false(nbi_path_is_file(test_path(".t2.nibble-999-0")));
    assert_true(nbi_path_is_file(test_path(".t2.nibble-998-0"))); /* its writer is alive */
    close(live);
    put("t2", "x");
    assert_false(nbi_path_is_file(test_path(".t2.nibble-998-0")));
}

/* Writers of the same target that begin and end concurrently. */
static void *create_and_abort(void *arg)
{
    const char *target = arg;
    for (int i = 0; i < 1500; i++) {
        char *temp;
        int fd;
        struct stat a, b;
        if (nbi_temp_create(target, i % 2, &temp, &fd) != NB_OK)
            return (void *)"not created";
        bool ours = fstat(fd, &a) == 0 && lstat(temp, &b) == 0 && a.st_ino == b.st_ino;
        nbi_remove_tree(temp);
        close(fd);
        free(temp);
        if (!ours)
            return (void *)"somebody removed it";
    }
    return NULL;
}

static void test_temp__writers_of_one_target_do_not_interfere(void **state)
{
    (void)state;
    pthread_t threads[4];
    char target[300];
    snprintf(target, sizeof target, "%s", test_path("t4"));
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, create_and_abort, target), 0);
    for (int i = 0; i < 4; i++) {
        void *problem;
        assert_int_equal(pthread_join(threads[i], &problem), 0);
        if (problem)
            fail_msg("%s", (const char *)problem);
    }
    assert_int_equal(temporaries(), 0);
}

/* Runs once between the open of an entry and its lock. */
static void (*before_lock)(void);

int __real_flock(int fd, int operation);
int __wrap_flock(int fd, int operation);

int __wrap_flock(int fd, int operation)
{
    void (*act)(void) = before_lock;
    before_lock = NULL;
    if (act)
        act();
    return __real_flock(fd, operation);
}

/* Another writer has removed the dead entry and created and locked its own of the same name. */
static int live_fd;

static void replace_the_dead_entry(void)
{
    assert_int_equal(unlink(test_path(".t5.nibble-997-0")), 0);
    live_fd = open(test_path(".t5.nibble-997-0"), O_CREAT | O_EXCL | O_RDWR, 0600);
    assert_true(live_fd >= 0);
    assert_int_equal(__real_flock(live_fd, LOCK_EX), 0);
}

static void test_temp__cleaning_spares_a_new_entry_of_the_same_name(void **state)
{
    (void)state;
    put(".t5.nibble-997-0", "dead");
    before_lock = replace_the_dead_entry;
    nbi_temp_clean(test_dir, ".t5.");
    assert_null(before_lock);
    assert_true(nbi_path_is_file(test_path(".t5.nibble-997-0")));
    close(live_fd);
    nbi_temp_clean(test_dir, ".t5.");
    assert_false(nbi_path_is_file(test_path(".t5.nibble-997-0")));
}

/* A process that cleans up has locked the new entry and will remove it. */
static char taken[300];

static void *remove_later(void *arg)
{
    int fd = *(int *)arg;
    usleep(50000);
    unlink(taken);
    close(fd);
    return NULL;
}

static pthread_t cleaner;

static void lock_the_new_entry(void)
{
    static int fd;
    snprintf(taken, sizeof taken, "%s/.t6.nibble-%d-0", test_dir, (int)getpid());
    for (int i = 1; i < 100 && !nbi_path_is_file(taken); i++)
        snprintf(taken, sizeof taken, "%s/.t6.nibble-%d-%d", test_dir, (int)getpid(), i);
    fd = open(taken, O_RDONLY);
    assert_true(fd >= 0);
    assert_int_equal(__real_flock(fd, LOCK_EX), 0);
    assert_int_equal(pthread_create(&cleaner, NULL, remove_later, &fd), 0);
}

static void test_temp__an_entry_removed_before_its_lock_is_created_again(void **state)
{
    char *temp;
    int fd;
    struct stat a, b;
    (void)state;
    before_lock = lock_the_new_entry;
    assert_ok(nbi_temp_create(test_path("t6"), false, &temp, &fd));
    assert_int_equal(pthread_join(cleaner, NULL), 0);
    assert_int_equal(fstat(fd, &a), 0);
    assert_int_equal(lstat(temp, &b), 0);
    assert_int_equal(a.st_ino, b.st_ino);
    nbi_remove_tree(temp);
    free(temp);
    close(fd);
}

static void test_outfile__refuses_targets_it_cannot_replace(void **state)
{
    (void)state;
    struct nbi_outfile *f;
    assert_fails(nbi_outfile_open(&f, test_dir), NB_EIO, "not a regular file");
    assert_fails(nbi_outfile_open(&f, test_path("no/such/dir")), NB_EIO, "cannot create a file");
}

static void test_paths__join_split_and_compare(void **state)
{
    (void)state;
    static const struct {
        const char *path, *dir, *base;
    } rows[] = {{"a/b", "a", "b"}, {"b", ".", "b"}, {"/b", "/", "b"}, {"/a/b/c", "/a/b", "c"}};
    static const char *const slashes[][2] = {
        {"a/b/", "a"}, {"b//", "."}, {"/b/", "/"}, {"//", "/"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char *dir = nbi_path_dir(rows[i].path);
        assert_string_equal(dir, rows[i].dir);
        assert_string_equal(nbi_path_base(rows[i].path), rows[i].base);
        free(dir);
    }
    for (size_t i = 0; i < sizeof slashes / sizeof *slashes; i++) {
        char *dir = nbi_path_dir(slashes[i][0]);
        assert_string_equal(dir, slashes[i][1]);
        free(dir);
    }
    char *p = nbi_path_join("a//", "b"), *q = nbi_path_join("/", "b");
    assert_string_equal(p, "a/b");
    assert_string_equal(q, "/b");
    free(p);
    free(q);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_source__reads_exactly_or_fails),
        cmocka_unit_test(test_source__a_shrinking_file_is_an_error),
        cmocka_unit_test(test_source__opens_only_regular_files),
        cmocka_unit_test(test_cursor__reads_numbers_within_bounds),
        cmocka_unit_test(test_cursor__window_is_invisible),
        cmocka_unit_test(test_cursor__uleb_refuses_overlong_encodings),
        cmocka_unit_test(test_outfile__target_changes_at_commit_only),
        cmocka_unit_test(test_outfile__writes_through_a_link),
        cmocka_unit_test(test_outfile__removes_leftovers_of_dead_writers),
        cmocka_unit_test(test_temp__writers_of_one_target_do_not_interfere),
        cmocka_unit_test(test_temp__cleaning_spares_a_new_entry_of_the_same_name),
        cmocka_unit_test(test_temp__an_entry_removed_before_its_lock_is_created_again),
        cmocka_unit_test(test_outfile__refuses_targets_it_cannot_replace),
        cmocka_unit_test(test_paths__join_split_and_compare),
    };
    return cmocka_run_group_tests_name("file", tests, make_test_dir, remove_test_dir);
}
