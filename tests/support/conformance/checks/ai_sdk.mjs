// The AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

import { awaitCancelled, BASE_URL, check, equal, refusedWith, runChecks, SAID, tookTokens } from "./checking.mjs";

let lastId;
async function watched(url, options) {
  const answer = await fetch(url, options);
  lastId = answer.headers.get("x-request-id");
  return answer;
}

const provider = createOpenAICompatible({
  name: "sluice",
  baseURL: BASE_URL,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
  fetch: watched,
});
const COMMON = { model: provider(SAID.model), temperature: 0, maxRetries: 0 };
const statusOf = (error) => error.statusCode;

function weather(cities) {
  const execute = async ({ city }) => {
    cities.push(city);
    return "Snow.";
  };
  const { description, parameters } = SAID.weather;
  return { get_weather: tool({ description, inputSchema: jsonSchema(parameters), execute }) };
}

check("chat: answer", async () => {
  const { text, usage } = await generateText({ ...COMMON, prompt: SAID.count });
  equal([text, usage.outputTokens > 0], [SAID.counted, true]);
});

check("chat: stream", async () => {
  const { textStream, usage } = streamText({ ...COMMON, prompt: SAID.count });
  let text = "";
  for await (const piece of textStream) text += piece;
  equal([text, (await usage).outputTokens > 0], [SAID.counted, true]);
});

check("chat: tools", async () => {
  const cities = [];
  const fields = { ...COMMON, prompt: SAID.call, tools: weather(cities), stopWhen: stepCountIs(2) };
  await generateText(fields);
  equal(cities[0], "Oslo");
  cities.length = 0;
  await streamText(fields).consumeStream();
  equal(cities[0], "Oslo");
});

check("chat: JSON schema", async () => {
  const output = Output.object({ schema: jsonSchema(SAID.schema) });
  const result = await generateText({ ...COMMON, prompt: SAID.capital, output, experimental_output: output });
  equal(result.output ?? result.experimental_output, SAID.oslo);
});

check("chat: reasoning", async () => {
  const { text, reasoningText } = await generateText({ ...COMMON, prompt: SAID.think });
  equal([reasoningText, text], [SAID.thought, SAID.sum]);
});

check("chat: image", async () => {
  const image = Buffer.from(SAID.image, "base64");
  const content = [{ type: "text", text: SAID.question }, { type: "image", image, mediaType: "image/png" }];
  const messages = [{ role: "user", content }];
  const fields = { ...COMMON, model: provider(SAID.seeing), maxOutputTokens: 16 };
  const shown = await generateText({ ...fields, messages });
  tookTokens(shown.usage.inputTokens, (await generateText({ ...fields, prompt: SAID.question })).usage.inputTokens);
  await refusedWith(400, statusOf, () => generateText({ ...COMMON, messages }));
});

check("chat: errors", async () => {
  await refusedWith(404, statusOf, () => generateText({ ...COMMON, model: provider("absent"), prompt: SAID.count }));
  await refusedWith(400, statusOf, () => generateText({ ...COMMON, topP: 7, prompt: SAID.count }));
});

check("chat: cancel", async () => {
  const leaving = new AbortController();
  const providerOptions = { sluice: { logit_bias: SAID.unending } };
  const fields = { ...COMMON, prompt: SAID.count, maxOutputTokens: SAID.limit, providerOptions };
  const { textStream } = streamText({ ...fields, abortSignal: leaving.signal, onError: () => {} });
  for await (const _ of textStream) {
    leaving.abort();
    break;
  }
  await awaitCancelled(lastId);
});

check("completions: refused", async () => {
  const model = provider.completionModel(SAID.model);
  await refusedWith(400, statusOf, () => generateText({ ...COMMON, model, prompt: "1 2 3" }));
});

await runChecks("@ai-sdk/openai-compatible");
