/* test_staging_dir.c - model directories appear complete, and other directories are not touched. */
#include <sys/stat.h>
#include <unistd.h>

#include "convert/staging_dir.h"
#include "unit/support.h"

static void begin_with_file(struct nbi_staging_dir *s, const char *target, const char *name,
                            const char *text)
{
    assert_ok(nbi_staging_dir_begin(s, target));
    char *path = nbi_path_join(s->temp, name);
    assert_ok(nbi_file_write(path, text, strlen(text)));
    free(path);
}

static void test_staging_dir__commit_creates_and_abort_removes(void **state)
{
    (void)state;
    struct nbi_staging_dir s;
    begin_with_file(&s, test_path("d1/"), "config.json", "{}");
    assert_false(nbi_path_is_dir(test_path("d1")));
    assert_ok(nbi_staging_dir_commit(&s));
    assert_content("d1/config.json", "{}");
    begin_with_file(&s, test_path("d2"), "config.json", "{}");
    nbi_staging_dir_abort(&s);
    assert_false(nbi_path_is_dir(test_path("d2")));
    assert_int_equal(temporaries(), 0);
}

static void test_staging_dir__replaces_a_model_and_keeps_other_files(void **state)
{
    (void)state;
    struct nbi_staging_dir s;
    assert_int_equal(mkdir(test_path("m"), 0777), 0);
    put("m/config.json", "old");
    put("m/model-00001-of-00002.safetensors", "old");
    put("m/notes.txt", "mine");
    begin_with_file(&s, test_path("m"), "config.json", "new");
    assert_content("m/config.json", "old");
    assert_ok(nbi_staging_dir_commit(&s));
    assert_content("m/config.json", "new");
    assert_content("m/notes.txt", "mine");
    assert_false(nbi_path_is_file(test_path("m/model-00001-of-00002.safetensors")));
    assert_int_equal(temporaries(), 0);
}

static void test_staging_dir__refuses_directories_without_a_model(void **state)
{
    (void)state;
    struct nbi_staging_dir s;
    assert_int_equal(mkdir(test_path("home"), 0777), 0);
    put("home/thesis.txt", "years of work");
    assert_fails(nbi_staging_dir_begin(&s, test_path("home")), NB_EIO, "not a model directory");
    put("home/config.json", "{}");
    put("home/other.dat", "weights");
    assert_fails(nbi_staging_dir_begin(&s, test_path("home")), NB_EIO, "other.dat");
    unlink(test_path("home/other.dat"));
    assert_int_equal(mkdir(test_path("home/sub"), 0777), 0);
    assert_fails(nbi_staging_dir_begin(&s, test_path("home")), NB_EIO, "'sub'");
    assert_content("home/thesis.txt", "years of work");
    assert_int_equal(symlink("nothing", test_path("dangling")), 0);
    assert_fails(nbi_staging_dir_begin(&s, test_path("dangling")), NB_EIO, "a link to nothing");
    assert_fails(nbi_staging_dir_begin(&s, "/proc"), NB_EIO, "mount point");
    assert_fails(nbi_staging_dir_begin(&s, "."), NB_EIO, "the current directory");
    put("file", "x");
    assert_fails(nbi_staging_dir_begin(&s, test_path("file")), NB_EIO, "a file has that name");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_staging_dir__commit_creates_and_abort_removes),
        cmocka_unit_test(test_staging_dir__replaces_a_model_and_keeps_other_files),
        cmocka_unit_test(test_staging_dir__refuses_directories_without_a_model),
    };
    return cmocka_run_group_tests_name("staging_dir", tests, make_test_dir, remove_test_dir);
}
