// Conversations of Node's SDKs: `conversations.mjs NAME MODEL URL` holds those of one with a server. With the path of a
// PNG after them, it asks what is in it, once streamed.
//
// As in conversations.py, a tool is called and its result seen, what the model said goes back as the SDK itself
// passes it, and one answer is streamed. Printed are the answers, as JSON.
import { readFileSync } from "node:fs";
import process from "node:process";

const [name, model, url, picture] = process.argv.slice(2);
const key = process.env.API_KEY;
const question = `Scene 1 of ${name}: what is the weather in Paris?`;
const weather = ({ city }) => (city === "Paris" ? "21 degrees and sunny" : "no such city");
const about = { name: "get_weather", description: "Get the weather" };
const schema = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};

async function joined(pieces, text) {
  let whole = "";
  for await (const piece of pieces) whole += text(piece) ?? "";
  return whole;
}

const run = {
  async "openai-node"() {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
    const tools = [{ type: "function", function: { ...about, parameters: schema } }];
    const messages = [{ role: "user", content: question }];
    const first = await client.chat.completions.create({ model, messages, tools });
    const { message } = first.choices[0];
    const [call] = message.tool_calls;
    const content = weather(JSON.parse(call.function.arguments));
    messages.push(message, { role: "tool", tool_call_id: call.id, content });
    const stream = await client.chat.completions.create({ model, messages, tools, stream: true });
    const answers = [await joined(stream, (piece) => piece.choices[0]?.delta.content)];
    const offered = [{ type: "function", ...about, parameters: schema, strict: false }];
    const input = [{ role: "user", content: question }];
    const response = await client.responses.create({ model, input, tools: offered });
    const asked = response.output.find((item) => item.type === "function_call");
    const output = weather(JSON.parse(asked.arguments));
    input.push(...response.output, { type: "function_call_output", call_id: asked.call_id, output });
    const events = client.responses.stream({ model, input, tools: offered });
    answers.push((await events.finalResponse()).output_text);
    const runner = client.chat.completions.runTools({
      model,
      messages: [{ role: "user", content: question }],
      tools: [{ type: "function", function: { ...about, parameters: schema, parse: JSON.parse, function: weather } }],
    });
    answers.push(await runner.finalContent());
    return answers;
  },
  async "anthropic-node"() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
    const tools = [{ ...about, input_schema: schema }];
    const messages = [{ role: "user", content: question }];
    const said = await client.messages.create({ model, max_tokens: 200, messages, tools });
    const call = said.content.find((block) => block.type === "tool_use");
    const content = [{ type: "tool_result", tool_use_id: call.id, content: weather(call.input) }];
    messages.push({ role: "assistant", content: said.content }, { role: "user", content });
    const final = await client.messages.stream({ model, max_tokens: 200, messages, tools }).finalMessage();
    const counted = await client.messages.countTokens({ model, messages, tools });
    if (!(counted.input_tokens > 20)) throw new Error("nothing was counted");
    return [final.content[0].text];
  },
  async "ollama-node"() {
    const { Ollama } = await import("ollama");
    const client = new Ollama({ host: url, headers: { authorization: `Bearer ${key}` } });
    const tools = [{ type: "function", function: { ...about, parameters: schema } }];
    const messages = [{ role: "user", content: question }];
    const { message } = await client.chat({ model, messages, tools });
    const content = weather(message.tool_calls[0].function.arguments);
    messages.push(message, { role: "tool", tool_name: "get_weather", content });
    const stream = await client.chat({ model, messages, tools, stream: true });
    return [await joined(stream, (piece) => piece.message.content)];
  },
  async "vercel-ai"() {
    const { generateText, streamText, tool, jsonSchema, stepCountIs } = await import("ai");
    const { createOpenAI } = await import("@ai-sdk/openai");
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    const tools = {
      get_weather: tool({ description: about.description, inputSchema: jsonSchema(schema), execute: weather }),
    };
    const given = { baseURL: `${url}/v1`, apiKey: key };
    const openai = createOpenAI(given);
    const kinds = [
      createOpenAICompatible({ ...given, name: "sealring" })(model),
      openai(model),
      openai.chat(model),
      createAnthropic(given)(model),
    ];
    const answers = [];
    for (const kind of kinds) {
      const asked = { model: kind, tools, prompt: question, stopWhen: stepCountIs(3), maxRetries: 0 };
      answers.push((await generateText(asked)).text, await joined(streamText(asked).textStream, (text) => text));
    }
    return answers.map((text) => text.slice(text.indexOf("It is")));
  },
  async "langchain-js"() {
    const { ChatOpenAI } = await import("@langchain/openai");
    const { ChatAnthropic } = await import("@langchain/anthropic");
    const { ChatOllama } = await import("@langchain/ollama");
    const { HumanMessage, ToolMessage } = await import("@langchain/core/messages");
    const open = { model, apiKey: key, maxRetries: 0, configuration: { baseURL: `${url}/v1` } };
    const kinds = [
      new ChatOpenAI(open),
      new ChatOpenAI({ ...open, useResponsesApi: true }),
      new ChatAnthropic({ model, apiKey: key, anthropicApiUrl: url, maxRetries: 0 }),
      new ChatOllama({ model, baseUrl: url, headers: { authorization: `Bearer ${key}` } }),
    ];
    const answers = [];
    for (const kind of kinds) {
      const chat = kind.bindTools([{ type: "function", function: { ...about, parameters: schema } }]);
      const messages = [new HumanMessage(question)];
      messages.push(await chat.invoke(messages));
      const [call] = messages[1].tool_calls;
      messages.push(new ToolMessage({ content: weather(call.args), tool_call_id: call.id, name: call.name }));
      answers.push(await joined(await chat.stream(messages), (piece) => piece.text));
    }
    return answers;
  },
};

const file = picture && readFileSync(picture);
const base64 = file?.toString("base64");
const shown = `data:image/png;base64,${base64}`;
const what = "What is in this picture?";

const show = {
  async "openai-node"() {
    const { default: OpenAI } = await import("openai");
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
    const parts = [{ type: "image_url", image_url: { url: shown } }, { type: "text", text: what }];
    const messages = [{ role: "user", content: parts }];
    const stream = await client.chat.completions.create({ model, messages, temperature: 0, stream: true });
    const content = [{ type: "input_image", image_url: shown, detail: "auto" }, { type: "input_text", text: what }];
    const response = await client.responses.create({ model, input: [{ role: "user", content }], temperature: 0 });
    return [await joined(stream, (piece) => piece.choices[0]?.delta.content), response.output_text];
  },
  async "anthropic-node"() {
    const { default: Anthropic } = await import("@anthropic-ai/sdk");
    const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
    const source = { type: "base64", media_type: "image/png", data: base64 };
    const messages = [{ role: "user", content: [{ type: "image", source }, { type: "text", text: what }] }];
    const asked = { model, max_tokens: 100, temperature: 0, messages };
    const streamed = await client.messages.stream(asked).finalMessage();
    return [(await client.messages.create(asked)).content[0].text, streamed.content[0].text];
  },
  async "ollama-node"() {
    const { Ollama } = await import("ollama");
    const client = new Ollama({ host: url, headers: { authorization: `Bearer ${key}` } });
    const options = { temperature: 0 };
    const messages = [{ role: "user", content: what, images: [file] }];
    const stream = await client.chat({ model, messages, options, stream: true });
    const { response } = await client.generate({ model, prompt: what, images: [base64], options });
    return [await joined(stream, (piece) => piece.message.content), response];
  },
};

console.log(JSON.stringify(await (picture ? show : run)[name]()));
