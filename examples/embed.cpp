// embed.cpp - the library in C++: owners that close what they hold, errors as exceptions.
// Run it with models/nib 'One day'; examples/README.md says how to build it.
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nibble.h>
#include <stdexcept>

template <typename T> using owner = std::unique_ptr<T, void (*)(T *)>;

static void check(nb_status status)
{
    if (status != NB_OK)
        throw std::runtime_error(nb_last_error());
}

static owner<nb_engine> load(const char *model)
{
    nb_engine *engine = nullptr;
    nb_engine_opts opts = {};
    opts.model = model;
    check(nb_engine_open(&engine, &opts));
    return {engine, nb_engine_close};
}

static owner<nb_session> begin(const nb_engine *engine)
{
    nb_session *session = nullptr;
    const nb_session_opts opts = {};
    check(nb_session_open(&session, engine, &opts));
    return {session, nb_session_close};
}

static std::string go_on(const nb_engine *engine, const std::string &text)
{
    int32_t *ids = nullptr;
    size_t count = 0;
    check(nb_tokenizer_encode(nb_engine_tokenizer(engine), text.data(), text.size(), false, &ids,
                              &count));
    const std::unique_ptr<int32_t, void (*)(void *)> owned(ids, std::free);
    struct nb_engine_info info;
    nb_engine_info(engine, &info);
    nb_generate_opts opts = {};
    opts.sampling = info.sampling;
    opts.max_tokens = 20;
    nb_generate_result result = {};
    check(nb_generate(begin(engine).get(), ids, count, &opts, &result));
    std::string answer(result.text, result.len);
    nb_generate_result_release(&result);
    return text + answer;
}

int main(int argc, char **argv)
try {
    for (int i = 2; i < argc; i++)
        std::cout << go_on(load(argv[1]).get(), argv[i]) << "\n";
} catch (const std::exception &error) {
    return std::cerr << error.what() << "\n", 1;
}
