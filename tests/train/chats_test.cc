// Tests chats from lines of messages to marked shards, against transformers. The program is
// //train:chats; tests/interop/make_chat_fixture.py wrote testdata/chats.json.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "burst/base/parallel.h"
#include "tests/testing/subprocess.h"
#include "tests/train/tokenizer_fixture.h"
#include "train/data/corpus.h"
#include "train/data/tokenize.h"

namespace burst {
namespace {

using Json = nlohmann::json;

constexpr char kTemplate[] = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";
constexpr char kChat[] =
    R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})";

class ChatsTest : public testing::Test {
 protected:
  void SetUp() override {
    fixture_ = Json::parse(ReadAll("tests/train/testdata/chats.json"));
    Json tokenizer = Json::parse(ReadAll(TokenizerFixture("tiny/tokenizer.json")));
    for (const Json& token : fixture_["added_tokens"]) tokenizer["added_tokens"].push_back(token);
    std::filesystem::create_directories(folder_ + "/model");
    Write("model/tokenizer.json", tokenizer.dump());
    Write("model/tokenizer_config.json", R"({"bos_token": "<bos>", "eos_token": "<eos>"})");
  }

  void Write(const std::string& name, const std::string& content) const {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << content;
  }

  // Renders lines by the template in the model's folder.
  Result Render(const std::string& lines, std::vector<std::string> more = {}) const {
    Write("chats.jsonl", lines);
    std::vector<std::string> command = {"/usr/bin/python3", ProgramPath("train/tools/chats.py"),
                                        "--data=chats.jsonl", "--template=model",
                                        "--out=rendered.jsonl"};
    command.insert(command.end(), more.begin(), more.end());
    return Subprocess(command, {folder_}).Wait();
  }

  // Expects one sentence with this part, and no half of a result.
  void ExpectOneError(const Result& result, const std::string& part) const {
    EXPECT_EQ(result.exit_code, 1) << result.err;
    EXPECT_TRUE(absl::StartsWith(result.err, "error: --")) << result.err;
    EXPECT_EQ(std::count(result.err.begin(), result.err.end(), '\n'), 1) << result.err;
    EXPECT_TRUE(absl::StrContains(result.err, part)) << part << " is missing in " << result.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ + "/rendered.jsonl.part"));
  }

  struct Loaded {
    std::vector<int32_t> tokens;
    std::vector<int> counts;
    std::vector<int64_t> starts;
  };

  static Loaded Load(const absl::StatusOr<TrainingData>& data) {
    Loaded loaded;
    EXPECT_TRUE(data.ok()) << data.status();
    if (!data.ok()) return loaded;
    const Corpus& corpus = *data->train.corpus;
    loaded.tokens.resize(corpus.size());
    EXPECT_TRUE(corpus.Read(0, corpus.size(), loaded.tokens.data()).ok());
    loaded.counts.assign(corpus.size(), 1);
    std::vector<int64_t> places;
    EXPECT_TRUE(corpus.NotCounted(0, corpus.size(), &places).ok());
    for (const int64_t place : places) loaded.counts[place] = 0;
    EXPECT_TRUE(corpus.DocumentStarts(0, corpus.size(), &loaded.starts).ok());
    return loaded;
  }

  // Returns the rendered lines as shards, and as a text that the trainer encodes.
  std::vector<Loaded> LoadBoth() const {
    std::filesystem::remove_all(folder_ + "/shards");
    TokenizeConfig config;
    config.data = folder_ + "/rendered.jsonl";
    config.tokenizer = folder_ + "/model";
    config.out = folder_ + "/shards";
    config.shard_tokens = 30;
    const auto summary = TokenizeToShards(config);
    EXPECT_TRUE(summary.ok()) << summary.status();
    const std::string shards = folder_ + "/shards/train_*.bin", cache = folder_ + "/cache";
    const auto tokenizer = Tokenizer::Load(folder_ + "/model");
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return {Load(LoadTrainingData(shards, shards, std::nullopt, cache)),
            Load(LoadTrainingData(config.data, config.data, std::nullopt, cache, &*tokenizer))};
  }

  const std::string folder_ = FreshTestFolder();
  const ScopedThreadPool pool_{2};
  Json fixture_;
};

// Tokens and marks equal transformers', with the template's marks and, without them, by prefixes.
TEST_F(ChatsTest, TokensAndMasksEqualTransformers) {
  for (const auto& [name, family] : fixture_["families"].items()) {
    std::string lines;
    Loaded expected;
    for (const Json& chat : family["chats"]) {
      lines += Json{{"messages", chat["messages"]}}.dump() + "\n";
      expected.starts.push_back(static_cast<int64_t>(expected.tokens.size()));
      for (const int32_t token : chat["tokens"]) expected.tokens.push_back(token);
      for (const int count : chat["mask"]) expected.counts.push_back(count);
    }
    const std::string marked = family["template"];
    const std::string plain =
        absl::StrReplaceAll(marked, {{"{% generation %}", ""}, {"{% endgeneration %}", ""}});
    ASSERT_NE(plain, marked);
    for (const std::string& chat_template : {marked, plain}) {
      SCOPED_TRACE(chat_template);
      Write("model/chat_template.jinja", chat_template);
      const Result result = Render(lines);
      ASSERT_EQ(result.exit_code, 0) << result.err;
      for (const Loaded& loaded : LoadBoth()) {
        EXPECT_EQ(loaded.tokens, expected.tokens);
        EXPECT_EQ(loaded.counts, expected.counts);
        EXPECT_EQ(loaded.starts, expected.starts);
      }
    }
  }
}

// The tokenizer puts marks of spaces before parts, or composes characters. The library tokenizers
// gave the expected tokens and their offsets (tests/interop/make_forms_fixture.py).
TEST_F(ChatsTest, MasksOfTextsThatTheTokenizerChanges) {
  const Json forms = Json::parse(ReadAll(TokenizerFixture("masks.json")));
  EXPECT_EQ(forms.size(), 6u);
  for (const auto& [name, form] : forms.items()) {
    const std::string base = form["base"];
    Json tokenizer = Json::parse(ReadAll(TokenizerFixture(base + "/tokenizer.json")));
    tokenizer.update(form["changes"]);
    Write("model/tokenizer.json", tokenizer.dump());
    for (const Json& chat : form["chats"]) {
      SCOPED_TRACE(name + ": " + chat["text"].dump());
      Write("rendered.jsonl",
            Json{{"text", chat["text"]}, {"counted", chat["counted"]}}.dump() + "\n");
      for (const Loaded& loaded : LoadBoth()) {
        EXPECT_EQ(loaded.tokens, chat["tokens"].get<std::vector<int32_t>>());
        EXPECT_EQ(loaded.counts, chat["mask"].get<std::vector<int>>());
      }
    }
  }
}

// The options choose roles. Prompts and completions are texts or messages.
TEST_F(ChatsTest, RolesAndCompletions) {
  Write("model/chat_template.jinja", fixture_["families"]["chatml"]["template"]);
  const auto counted = [&] {
    std::istringstream rendered(ReadAll(folder_ + "/rendered.jsonl"));
    std::vector<std::string> texts;
    for (std::string line; std::getline(rendered, line);) {
      const Json row = Json::parse(line);
      const std::string text = row["text"];
      for (const Json& range : row["counted"]) {
        texts.push_back(text.substr(range[0], range[1].get<int>() - range[0].get<int>()));
      }
    }
    return texts;
  };
  const std::string chat =
      R"({"messages": [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "a"}]})"
      "\n";
  ASSERT_EQ(Render(chat, {"--roles=user,assistant"}).exit_code, 0);
  EXPECT_EQ(counted(),
            (std::vector<std::string>{"<|im_start|>user\né?<|im_end|>\n", "a<|im_end|>\n"}));
  ASSERT_EQ(Render(chat, {"--roles=user"}).exit_code, 0);
  EXPECT_EQ(counted(), (std::vector<std::string>{"<|im_start|>user\né?<|im_end|>\n"}));
  ASSERT_EQ(Render(R"({"prompt": "2 + 2 =", "completion": " 4"})"
                   "\n"
                   R"({"prompt": [{"role": "user", "content": "é"}],)"
                   R"( "completion": [{"role": "assistant", "content": "b"}]})")
                .exit_code,
            0);
  EXPECT_EQ(counted(), (std::vector<std::string>{" 4<eos>", "b<|im_end|>\n"}));
}

// Tags in a comment or in raw text mark nothing, so the messages are found by prefixes.
TEST_F(ChatsTest, TagsInACommentAreNoMarks) {
  for (const char* tags : {"{# {% generation %} #}", "{% raw %}{% generation %}{% endraw %}"}) {
    Write("model/chat_template.jinja", absl::StrCat(tags, kTemplate));
    ASSERT_EQ(Render(kChat).exit_code, 0) << tags;
    const Json row = Json::parse(ReadAll(folder_ + "/rendered.jsonl"));
    const std::string text = row["text"];
    ASSERT_EQ(row["counted"].size(), 1u);
    EXPECT_EQ(text.substr(row["counted"][0][0]), "<assistant>b");
  }
}

// Halves of a surrogate pair in two messages stay two characters.
TEST_F(ChatsTest, HalvesOfAPairDoNotMeet) {
  Write("model/chat_template.jinja", "{% for m in messages %}{{ m.content }}{% endfor %}");
  ASSERT_EQ(Render(R"({"messages": [{"role": "user", "content": "a\ud83d"},)"
                   R"( {"role": "assistant", "content": "\ude00b"}]})")
                .exit_code,
            0);
  const Json row = Json::parse(ReadAll(folder_ + "/rendered.jsonl"));
  EXPECT_EQ(row["text"],
            "a\xEF\xBF\xBD\xEF\xBF\xBD"
            "b");
  EXPECT_EQ(row["counted"], Json::parse("[[4, 8]]"));
}

// A template that changes what its tags mark leaves nothing of the marks in the data.
TEST_F(ChatsTest, FilteredMarksAreAnError) {
  Write("model/chat_template.jinja",
        "{% set x %}{% generation %}a{% endgeneration %}{% endset %}{{ x|upper }}");
  ExpectOneError(Render(kChat), "must not change what its generation tags mark");
}

// A prompt begins with the tokens that the tokenizer puts before a text: those of tokenizer.json,
// else BOS if the configuration adds it.
TEST_F(ChatsTest, PromptsBeginAsTheTokenizersTexts) {
  Write("model/chat_template.jinja", kTemplate);
  const auto text = [&] {
    const Result result = Render(R"({"prompt": "2 + 2 =", "completion": " 4"})");
    EXPECT_EQ(result.exit_code, 0) << result.err;
    const Json row = Json::parse(ReadAll(folder_ + "/rendered.jsonl"));
    const std::string all = row["text"];
    EXPECT_EQ(all.substr(row["counted"][0][0]), " 4<eos>");
    return all;
  };
  const Json begins = Json::parse(R"({"type": "TemplateProcessing", "single": [
      {"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
      {"SpecialToken": {"id": "</s>", "type_id": 0}}]})");
  Json tokenizer = Json::parse(ReadAll(folder_ + "/model/tokenizer.json"));
  for (const auto& [processor, beginning] :
       {std::pair(Json(), ""), std::pair(begins, "<s>"),
        std::pair(Json{{"type", "Sequence"},
                       {"processors", Json::array({Json{{"type", "ByteLevel"}}, begins})}},
                  "<s>"),
        std::pair(Json{{"type", "RobertaProcessing"}, {"cls", Json::array({"<c>", 0})}}, "<c>")}) {
    tokenizer["post_processor"] = processor;
    Write("model/tokenizer.json", tokenizer.dump());
    EXPECT_EQ(text(), absl::StrCat(beginning, "2 + 2 = 4<eos>")) << processor;
  }
  tokenizer["post_processor"] = nullptr;
  Write("model/tokenizer.json", tokenizer.dump());
  Write("model/tokenizer_config.json",
        R"({"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": true})");
  EXPECT_EQ(text(), "<bos>2 + 2 = 4<eos>");
}

// A program in place of //train:generate. It keeps its arguments and prompts, and gives the
// answers.
constexpr char kGenerate[] = R"(#!/usr/bin/python3
import json, os, sys
os.chdir(os.environ["BUILD_WORKING_DIRECTORY"])
answers = iter(json.load(open("answers.json")))
with open("prompts.jsonl", "w") as out:
    out.write(json.dumps(sys.argv[1:]) + "\n")
    for line in sys.stdin:
        out.write(line)
        answer = next(answers)
        for piece in (answer[:2], answer[2:]):
            print(json.dumps({"piece": piece}))
        print(json.dumps({"text": answer}), flush=True)
)";

// The prompts of //train:chat are the tokens that transformers has before each answer.
TEST_F(ChatsTest, ATalkHasTheTokensOfTransformers) {
  for (const char* script : {"chat.py", "chats.py"}) {
    Write(script, ReadAll(ProgramPath(absl::StrCat("train/tools/", script))));
  }
  Write("generate", kGenerate);
  std::filesystem::permissions(folder_ + "/generate", std::filesystem::perms::owner_all);
  const auto tokenizer = Tokenizer::Load(folder_ + "/model");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const auto& [name, family] : fixture_["families"].items()) {
    Write("model/chat_template.jinja", family["template"]);
    for (const Json& chat : family["chats"]) {
      SCOPED_TRACE(name + chat.dump());
      std::string lines, said;
      Json answers = Json::array();
      std::vector<std::string> command = {"/usr/bin/python3", folder_ + "/chat.py",
                                          "--checkpoint=model", "--tokens=7"};
      for (const Json& message : chat["messages"]) {
        const std::string content = message["content"];
        if (message["role"] == "system") command.push_back("--system=" + content);
        if (message["role"] == "user") lines += content + "\n";
        if (message["role"] != "assistant") continue;
        answers.push_back(content);
        said += content + "\n";
      }
      Write("answers.json", answers.dump());
      Write("lines", lines);
      const Result result =
          Subprocess(
              {"/bin/sh", "-c", "\"$0\" \"$@\" < \"$BUILD_WORKING_DIRECTORY/lines\"", command[0],
               command[1], command[2], command[3], command.size() > 4 ? command[4] : "--tokens=7"},
              {folder_})
              .Wait();
      ASSERT_EQ(result.exit_code, 0) << result.err;
      EXPECT_EQ(result.out, said);
      std::istringstream sent(ReadAll(folder_ + "/prompts.jsonl"));
      std::string line;
      std::getline(sent, line);
      EXPECT_TRUE(absl::StrContains(line, "\"--tokens=7\"")) << line;
      // An answer begins where the tokens begin to count.
      const std::vector<int32_t> tokens = chat["tokens"];
      const std::vector<int> mask = chat["mask"];
      size_t prompts = 0;
      for (size_t i = 1; i < tokens.size(); ++i) {
        if (mask[i] == 0 || mask[i - 1] == 1) continue;
        ASSERT_TRUE(std::getline(sent, line));
        const std::string text = Json::parse(line);
        std::vector<int32_t> prompt;
        ASSERT_TRUE(tokenizer->Encode(text, &prompt, Specials::kAreTokens).ok());
        // A line break that ends the prompt and one that begins the answer may be one token.
        EXPECT_EQ(prompt.size(), i + (tokenizer->Decode({tokens[i]}) == "\n\n" ? 1 : 0));
        prompt.resize(std::min(prompt.size(), i) - 1);
        EXPECT_EQ(prompt, std::vector<int32_t>(tokens.begin(), tokens.begin() + prompt.size()));
        ++prompts;
      }
      EXPECT_EQ(prompts, answers.size());
    }
  }
}

// Lines that cannot be rendered are errors that name the line, or are left out.
TEST_F(ChatsTest, BadLines) {
  Write("model/chat_template.jinja", fixture_["families"]["gemma"]["template"]);
  const std::string good = kChat, nested(100000, '[');
  const struct {
    const char *line, *message;
  } bad[] = {{R"({"messages": [{"role": "system", "content": "a"}]})", "System role not supported"},
             {R"({"text": "a"})", "it must have 'messages'"},
             {R"({"messages": [{"content": "a"}]})", "it must have 'messages'"},
             {"{", "it is not JSON"},
             {nested.c_str(), "it is nested too deeply"}};
  for (const auto& c : bad) {
    const Result error = Render(good + "\n" + c.line + "\n");
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_TRUE(absl::StrContains(error.err, "chats.jsonl: line 2: ")) << error.err;
    EXPECT_TRUE(absl::StrContains(error.err, c.message)) << error.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ + "/rendered.jsonl"));
    EXPECT_FALSE(std::filesystem::exists(folder_ + "/rendered.jsonl.part"));
  }
  const Result skipped = Render(good + "\n" + nested + "\n", {"--bad_lines=skip"});
  EXPECT_EQ(skipped.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(skipped.out, "left out 1 lines")) << skipped.out;
}

// A result replaces results, and no other file.
TEST_F(ChatsTest, OtherFilesAreKept) {
  Write("model/chat_template.jinja", kTemplate);
  for (const std::string other : {"notes\n", "{\"text\": \"a\"}\n", "[1]\n", "\xFF\n"}) {
    Write("rendered.jsonl", other);
    ExpectOneError(Render(kChat), "--out: must be a new file or rendered chats; got ");
    EXPECT_EQ(ReadAll(folder_ + "/rendered.jsonl"), other);
  }
  Write("rendered.jsonl", "");
  for (int times = 0; times < 2; ++times) {
    const Result result = Render(kChat);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

// A result is never written over the chats or the template.
TEST_F(ChatsTest, InputsAreKept) {
  Write("model/chat_template.jinja", kTemplate);
  Write("copy.jsonl.part", kChat);
  const std::pair<const char*, const char*> paths[] = {
      {"chats.jsonl", "chats.jsonl"},
      {"ch*.jsonl", "./chats.jsonl"},
      {"copy.jsonl.part", "copy.jsonl"},
      {"chats.jsonl", "model/chat_template.jinja"}};
  for (const auto& [data, out] : paths) {
    ExpectOneError(Render(kChat, {absl::StrCat("--data=", data), absl::StrCat("--out=", out)}),
                   "--out: must not be a file that is read; got ");
    EXPECT_EQ(ReadAll(folder_ + "/chats.jsonl"), kChat);
    EXPECT_EQ(ReadAll(folder_ + "/copy.jsonl.part"), kChat);
    EXPECT_EQ(ReadAll(folder_ + "/model/chat_template.jinja"), kTemplate);
  }
}

// An archive that is cut off or damaged is an error that names it, also when bad lines are skipped.
TEST_F(ChatsTest, BrokenArchives) {
  Write("model/chat_template.jinja", kTemplate);
  Render(kChat);
  const Result zipped = Subprocess({"/bin/gzip", "-k", folder_ + "/chats.jsonl"}, {folder_}).Wait();
  ASSERT_EQ(zipped.exit_code, 0) << zipped.err;
  const std::string whole = ReadAll(folder_ + "/chats.jsonl.gz");
  EXPECT_EQ(Render(kChat, {"--data=chats.jsonl.gz"}).exit_code, 0);
  for (const std::string& broken :
       {whole.substr(0, whole.size() - 6), whole.substr(0, 20) + std::string(20, '\xff'),
        std::string(kChat), whole + kChat}) {
    Write("chats.jsonl.gz", broken);
    for (const char* bad_lines : {"--bad_lines=error", "--bad_lines=skip"}) {
      ExpectOneError(Render(kChat, {"--data=chats.jsonl.gz", bad_lines}),
                     "chats.jsonl.gz: must be a whole gzip file; got: ");
    }
  }
}

// Errors of a template, and of the files next to it, name them.
TEST_F(ChatsTest, BrokenTemplates) {
  const std::pair<const char*, const char*> templates[] = {
      {"{{ 1 / 0 }}", "ZeroDivisionError"},
      {"{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"},
      {"{{ 9 ** 9999 }}", "must be a Jinja template"},
      {"{% if", "must be a Jinja template"},
      {"\xff", "chat_template.jinja: must be UTF-8"}};
  for (const auto& [text, message] : templates) {
    Write("model/chat_template.jinja", text);
    const Result result = Render(kChat);
    ExpectOneError(result, message);
    EXPECT_TRUE(absl::StrContains(result.err, folder_ + "/model")) << result.err;
    ExpectOneError(Render(kChat, {"--bad_lines=skip"}), message);
  }
  Write("model/chat_template.jinja", kTemplate);
  for (const char* config : {"[1]", "{", "\xff", "null"}) {
    Write("model/tokenizer_config.json", config);
    ExpectOneError(Render(kChat), "model/tokenizer_config.json: must be ");
  }
  std::filesystem::remove(folder_ + "/model/chat_template.jinja");
  Write("model/tokenizer_config.json", R"({"chat_template": 5})");
  ExpectOneError(Render(kChat), "model/tokenizer_config.json: chat_template must be a text");
}

// A result in which nothing counts would train nothing.
TEST_F(ChatsTest, SomethingMustCount) {
  Write("model/chat_template.jinja", kTemplate);
  ExpectOneError(Render(kChat, {"--roles="}), "--roles: must be names of roles");
  ExpectOneError(Render(kChat, {"--roles=asistant"}), "roles in the data: assistant, user");
  ExpectOneError(Render("\n"), "--data: must have a chat that can be rendered");
}

// A list under 'counted' must be ranges of the text.
TEST_F(ChatsTest, RangesAreChecked) {
  for (const char* counted : {"[[0]]", "[[2, 1]]", "[[0, 9]]", "[[0, 1], [0, 1]]", "[0, 1]",
                              "[[-1, 0]]", "[[0.5, 1]]", "[[[0, 1]]]", "[\"a\"]", "[{}]"}) {
    Write("rendered.jsonl", absl::StrCat(R"({"text": "abc", "counted": )", counted, "}"));
    TokenizeConfig config;
    config.data = folder_ + "/rendered.jsonl";
    config.tokenizer = folder_ + "/model";
    config.out = folder_ + "/shards";
    const absl::Status status = TokenizeToShards(config).status();
    EXPECT_TRUE(absl::StrContains(status.message(), "'counted' must be a list of ranges"))
        << counted << ": " << status;
  }
}

}  // namespace
}  // namespace burst
