// Tests chats from lines of messages to marked shards, against transformers. The program is
// //train:chats; tests/interop/make_chat_fixture.py wrote testdata/chats.json.
#include <gtest/gtest.h>
#include <sys/stat.h>

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
#include "tests/train/chats_fixture.h"
#include "train/data/corpus.h"
#include "train/data/tokenize.h"

namespace burst {
namespace {

using Json = nlohmann::json;

class ChatsTest : public RenderedChatsTest {
 protected:
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

  const ScopedThreadPool pool_{2};
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
  const std::string chat =
      R"({"messages": [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "a"}]})"
      "\n";
  ASSERT_EQ(Render(chat, {"--roles=user,assistant"}).exit_code, 0);
  EXPECT_EQ(Counted(),
            (std::vector<Strings>{{"<|im_start|>user\né?<|im_end|>\n", "a<|im_end|>\n"}}));
  ASSERT_EQ(Render(chat, {"--roles=user"}).exit_code, 0);
  EXPECT_EQ(Counted(), (std::vector<Strings>{{"<|im_start|>user\né?<|im_end|>\n"}}));
  ASSERT_EQ(Render(R"({"prompt": "2 + 2 =", "completion": " 4"})"
                   "\n"
                   R"({"prompt": [{"role": "user", "content": "é"}],)"
                   R"( "completion": [{"role": "assistant", "content": "b"}]})")
                .exit_code,
            0);
  EXPECT_EQ(Counted(), (std::vector<Strings>{{" 4<eos>"}, {"b<|im_end|>\n"}}));
  // A completion that has its end keeps one.
  ASSERT_EQ(Render(R"({"prompt": "a", "completion": "b<eos>"})").exit_code, 0);
  EXPECT_EQ(Texts(), (Strings{"ab<eos>"}));
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

// Talks with a program in place of //train:generate, whose files are made first.
class TalkTest : public RenderedChatsTest {
 protected:
  void SetUp() override {
    RenderedChatsTest::SetUp();
    for (const char* script : {"chat.py", "chat_template.py"}) {
      Write(script, ReadAll(ProgramPath(absl::StrCat("train/tools/", script))));
    }
    Write("generate", kGenerate);
    std::filesystem::permissions(folder_ + "/generate", std::filesystem::perms::owner_all);
  }

  // Says lines, and gets answers. The program's arguments and prompts are in prompts.jsonl.
  Result Talk(const std::string& lines, const Json& answers, const Strings& more) const {
    Write("answers.json", answers.dump());
    Write("lines", lines);
    Strings command = {"/bin/sh",
                       "-c",
                       "\"$0\" \"$@\" < \"$BUILD_WORKING_DIRECTORY/lines\"",
                       "/usr/bin/python3",
                       folder_ + "/chat.py",
                       "--checkpoint=model"};
    command.insert(command.end(), more.begin(), more.end());
    return Subprocess(command, {folder_}).Wait();
  }
};

// An answer ends before what the template puts behind every answer, not behind the last one alone.
TEST_F(TalkTest, StopsBehindAnAnswer) {
  const std::pair<const char*, const char*> ends[] = {
      {"{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>\n{% endfor %}"
       "{{ eos_token if not add_generation_prompt }}",
       "<|end|>"},
      {"{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}", "</s>"},
      {"{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ""}};
  for (const auto& [text, end] : ends) {
    Write("model/chat_template.jinja", text);
    const Result result = Talk("", Json::array(), {});
    ASSERT_EQ(result.exit_code, 0) << result.err;
    const std::string sent = ReadAll(folder_ + "/prompts.jsonl");
    const Json arguments = Json::parse(sent.substr(0, sent.find('\n')));
    EXPECT_EQ(arguments.back(), absl::StrCat("--stop=", end));
  }
}

// A line that is not UTF-8 is text with replacements.
TEST_F(TalkTest, BytesThatAreNotUtf8) {
  Write("model/chat_template.jinja", kTemplate);
  const Result result = Talk("h\xffi\n", Json::array({"yes"}), {});
  ASSERT_EQ(result.exit_code, 0) << result.err;
  EXPECT_TRUE(absl::StrContains(ReadAll(folder_ + "/prompts.jsonl"), "h\\ufffdi"));
}

// The prompts of //train:chat are the tokens that transformers has before each answer.
TEST_F(TalkTest, HasTheTokensOfTransformers) {
  const auto tokenizer = Tokenizer::Load(folder_ + "/model");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  for (const auto& [name, family] : fixture_["families"].items()) {
    Write("model/chat_template.jinja", family["template"]);
    for (const Json& chat : family["chats"]) {
      SCOPED_TRACE(name + chat.dump());
      std::string lines, said;
      Json answers = Json::array();
      Strings more = {"--tokens=7"};
      for (const Json& message : chat["messages"]) {
        const std::string content = message["content"];
        if (message["role"] == "system") more.push_back("--system=" + content);
        if (message["role"] == "user") lines += content + "\n";
        if (message["role"] != "assistant") continue;
        answers.push_back(content);
        said += content + "\n";
      }
      const Result result = Talk(lines, answers, more);
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
  } bad[] = {
      {R"({"messages": [{"role": "system", "content": "a"}]})", "System role not supported"},
      {R"({"text": "a"})", "it must have 'messages'"},
      {R"({"messages": [{"content": "a"}]})", "messages must be objects with a role"},
      {R"({"messages": []})", "messages must be a list of messages; got an empty list"},
      {R"({"messages": "[]"})", "messages must be a list of messages; got a text"},
      {R"({"messages": [{"role": "user", "content": "a"}], "prompt": "a", "completion": "b"})",
       "got all three"},
      {R"({"messages": [{"role": "user", "content": "a"}], "tools": ["f"]})",
       "tools must be a list of objects; got a list"},
      {R"({"messages": [{"role": "user", "content": "a"}], "documents": "f"})",
       "documents must be a list of objects; got a text"},
      {R"({"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": "{}"})",
       "chat_template_kwargs must be an object; got a text"},
      {R"({"messages": [{"role": "user", "content": "a"}],)"
       R"( "chat_template_kwargs": {"tools": []}})",
       "chat_template_kwargs must not have tools"},
      {"{", "it is not JSON"},
      {nested.c_str(), "it is nested too deeply"}};
  for (const auto& c : bad) {
    const Result error = Render(good + "\n" + c.line + "\n");
    EXPECT_EQ(error.exit_code, 1);
    EXPECT_TRUE(absl::StrContains(error.err, "chats.jsonl: line 2: ")) << error.err;
    EXPECT_TRUE(absl::StrContains(error.err, c.message)) << error.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ + "/rendered.jsonl"));
    ExpectNoPart();
  }
  const Result skipped = Render(good + "\n" + nested + "\n", {"--bad_lines=skip"});
  EXPECT_EQ(skipped.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(skipped.out, "left out 1 lines")) << skipped.out;
}

// A result replaces results, and no other file.
TEST_F(ChatsTest, OtherFilesAreKept) {
  Write("model/chat_template.jinja", kTemplate);
  for (const std::string& other :
       {std::string("notes\n"), std::string("{\"text\": \"a\"}\n"), std::string("[1]\n"),
        std::string("\xFF\n"), std::string(100000, '[')}) {
    Write("rendered.jsonl", other);
    ExpectOneError(Render(kChat), "--out: must be a new file or rendered chats; got ");
    EXPECT_EQ(ReadAll(folder_ + "/rendered.jsonl"), other);
  }
  // A folder or a device is never replaced.
  ExpectOneError(Render(kChat, {"--out=model"}),
                 "--out: must be a new file or rendered chats; got ");
  ASSERT_EQ(mkfifo((folder_ + "/pipe").c_str(), 0600), 0);
  ExpectOneError(Render(kChat, {"--out=pipe"}),
                 "--out: must be a new file or rendered chats; got ");
  EXPECT_TRUE(std::filesystem::is_fifo(folder_ + "/pipe"));
  Write("rendered.jsonl", "");
  for (int times = 0; times < 2; ++times) {
    const Result result = Render(kChat);
    EXPECT_EQ(result.exit_code, 0) << result.err;
  }
}

// A link to a result stays one, and a file with a similar name is not touched.
TEST_F(ChatsTest, LinksAndNeighborsAreKept) {
  Write("model/chat_template.jinja", kTemplate);
  Write("real.jsonl.part", "mine");
  std::filesystem::create_symlink("real.jsonl", folder_ + "/rendered.jsonl");
  ASSERT_EQ(Render(kChat).exit_code, 0);
  EXPECT_TRUE(std::filesystem::is_symlink(folder_ + "/rendered.jsonl"));
  EXPECT_TRUE(std::filesystem::is_regular_file(folder_ + "/real.jsonl"));
  EXPECT_EQ(ReadAll(folder_ + "/real.jsonl.part"), "mine");
}

// A result is never written over the chats or the template.
TEST_F(ChatsTest, InputsAreKept) {
  Write("model/chat_template.jinja", kTemplate);
  const std::pair<const char*, const char*> paths[] = {
      {"chats.jsonl", "chats.jsonl"},
      {"ch*.jsonl", "./chats.jsonl"},
      {"chats.jsonl", "model/chat_template.jinja"}};
  for (const auto& [data, out] : paths) {
    ExpectOneError(Render(kChat, {absl::StrCat("--data=", data), absl::StrCat("--out=", out)}),
                   "--out: must not be a file that is read; got ");
    EXPECT_EQ(ReadAll(folder_ + "/chats.jsonl"), kChat);
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

// A result in which nothing counts would train nothing.
TEST_F(ChatsTest, SomethingMustCount) {
  Write("model/chat_template.jinja", kTemplate);
  ExpectOneError(Render(kChat, {"--roles="}), "--roles: must be names of roles");
  ExpectOneError(Render(kChat, {"--roles=asistant"}), "roles in the data: assistant, user");
  ExpectOneError(Render("\n"), "--data: must have a chat that can be rendered");
  const std::string question = R"({"messages": [{"role": "user", "content": "a"}]})";
  const Result result =
      Render(std::string(kChat) + "\n" + question, {"--roles=assistant, asistant"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_TRUE(absl::StrContains(result.out, "1 of them have nothing that counts")) << result.out;
  EXPECT_TRUE(absl::StrContains(result.err, "no message has the role asistant\n")) << result.err;
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
