// OpenAI's SDK for Node: chat completions, responses, models, files and batches.
import OpenAI, { toFile } from "openai";

import {
  awaitCancelled, BASE_URL, batchLines, check, equal, HOOK_SECRET, IMAGE_PARTS, IMAGE_URL, received, refusedWith,
  runChecks, SAID, TOOL, tookTokens, untilEnded, user,
} from "./checking.mjs";

const client = new OpenAI({ baseURL: BASE_URL, apiKey: "none", maxRetries: 0, timeout: 60_000 });
const JSON_SCHEMA = { type: "json_schema", json_schema: { name: "city", schema: SAID.schema, strict: true } };
const FUNCTION = { type: "function", ...SAID.weather, strict: false };
const UNENDING = { logit_bias: SAID.unending };
const statusOf = (error) => error.status;

const chat = (messages = user(), fields = {}) =>
  client.chat.completions.create({ model: SAID.model, messages, temperature: 0, ...fields });
const respond = (input = SAID.count, fields = {}) =>
  client.responses.create({ model: SAID.model, input, temperature: 0, ...fields });

check("chat: answer", async () => {
  const completion = await chat();
  equal(completion.choices[0].message.content, SAID.counted);
});

check("chat: stream", async () => {
  let text = "";
  let usage = null;
  for await (const chunk of await chat(user(), { stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  equal([text, usage.completion_tokens > 0], [SAID.counted, true]);
  const runner = client.chat.completions.stream({ model: SAID.model, messages: user(), temperature: 0 });
  equal(await runner.finalContent(), SAID.counted);
});

check("chat: tools", async () => {
  const { message } = (await chat(user(SAID.call), { tools: [TOOL] })).choices[0];
  const [call] = message.tool_calls;
  equal([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Oslo" }]);
  const result = { role: "tool", tool_call_id: call.id, content: "Snow." };
  await chat([...user(SAID.call), message, result], { tools: [TOOL] });
  const fields = { model: SAID.model, messages: user(SAID.call), temperature: 0, tools: [TOOL] };
  const final = await client.chat.completions.stream(fields).finalChatCompletion();
  equal(JSON.parse(final.choices[0].message.tool_calls[0].function.arguments), { city: "Oslo" });
});

check("chat: JSON schema", async () => {
  const completion = await chat(user(SAID.capital), { response_format: JSON_SCHEMA });
  equal(JSON.parse(completion.choices[0].message.content), SAID.oslo);
});

check("chat: reasoning", async () => {
  const { message } = (await chat(user(SAID.think))).choices[0];
  equal([message.reasoning, message.content], [SAID.thought, SAID.sum]);
});

check("chat: n, stop, logprobs", async () => {
  const completion = await chat(user(), { n: 2, stop: [" 4"], logprobs: true, top_logprobs: 2, seed: 7 });
  equal(completion.choices.map((choice) => choice.message.content), ["1 2 3", "1 2 3"]);
  equal(completion.choices[0].logprobs.content[0].top_logprobs.length, 2);
});

check("chat: image", async () => {
  const fields = { model: SAID.seeing, max_tokens: 16 };
  const shown = await chat(user(IMAGE_PARTS), fields);
  tookTokens(shown.usage.prompt_tokens, (await chat(user(SAID.question), fields)).usage.prompt_tokens);
  await refusedWith(400, statusOf, () => chat(user(IMAGE_PARTS)));
});

check("chat: errors", async () => {
  const refused = await refusedWith(404, statusOf, () => chat(user(), { model: "absent" }));
  equal([refused.code, refused.param], ["model_not_found", "model"]);
  await refusedWith(400, statusOf, () => chat(user(), { top_p: 7, stream: true }));
});

check("chat: cancel", async () => {
  const stream = await chat(user(), { stream: true, max_tokens: SAID.limit, ...UNENDING });
  let id;
  for await (const chunk of stream) {
    id = chunk.id;
    break; // leaves
  }
  await awaitCancelled(id);
});

check("chat: retrieve", async () => {
  const { id } = await chat();
  equal((await client.chat.completions.retrieve(id)).choices[0].message.content, SAID.counted);
});

check("completions: refused", async () => {
  const fields = { model: SAID.model, prompt: "1 2 3" };
  const refused = await refusedWith(400, statusOf, () => client.completions.create(fields));
  equal(refused.code, "unsupported");
});

check("responses: answer", async () => {
  const response = await respond();
  equal([response.output_text, response.status], [SAID.counted, "completed"]);
  equal((await client.responses.retrieve(response.id)).output_text, SAID.counted);
});

check("responses: stream", async () => {
  const stream = client.responses.stream({ model: SAID.model, input: SAID.count, temperature: 0 });
  equal((await stream.finalResponse()).output_text, SAID.counted);
});

check("responses: tools", async () => {
  const first = await respond(SAID.call, { tools: [FUNCTION] });
  const [call] = first.output;
  equal([call.name, JSON.parse(call.arguments)], ["get_weather", { city: "Oslo" }]);
  const output = { type: "function_call_output", call_id: call.call_id, output: "Snow." };
  equal((await respond([output], { tools: [FUNCTION], previous_response_id: first.id })).status, "completed");
  const grammar = { type: "grammar", syntax: "regex", definition: "(yes|no)" };
  const tools = [{ type: "custom", name: "say", format: grammar }];
  const [said] = (await respond(SAID.count, { tools, tool_choice: { type: "custom", name: "say" } })).output;
  equal([said.type, ["yes", "no"].includes(said.input)], ["custom_tool_call", true]);
});

check("responses: JSON schema", async () => {
  const format = { type: "json_schema", name: "city", schema: SAID.schema, strict: true };
  equal(JSON.parse((await respond(SAID.capital, { text: { format } })).output_text), SAID.oslo);
});

check("responses: reasoning", async () => {
  const [reasoning, message] = (await respond(SAID.think)).output;
  equal([reasoning.content[0].text, message.content[0].text], [SAID.thought, SAID.sum]);
  const items = [{ role: "user", content: SAID.think }, reasoning, message, ...user()];
  equal((await respond(items)).output_text, SAID.counted);
});

check("responses: image", async () => {
  const parts = [{ type: "input_text", text: SAID.question }, { type: "input_image", image_url: IMAGE_URL }];
  const fields = { model: SAID.seeing, max_output_tokens: 16 };
  const shown = await respond(user(parts), fields);
  tookTokens(shown.usage.input_tokens, (await respond(SAID.question, fields)).usage.input_tokens);
  await refusedWith(400, statusOf, () => respond(user(parts)));
});

check("responses: errors", async () => {
  const refused = await refusedWith(400, statusOf, () => respond(SAID.count, { truncation: "auto" }));
  equal(refused.param, "truncation");
  await refusedWith(404, statusOf, () => client.responses.retrieve("resp_absent"));
});

check("responses: cancel", async () => {
  const fields = { max_output_tokens: SAID.limit, ...UNENDING };
  let id;
  for await (const event of await respond(SAID.count, { stream: true, ...fields })) {
    id = event.response.id;
    break; // leaves
  }
  await awaitCancelled(id);
  const background = await respond(SAID.count, { background: true, ...fields });
  equal((await client.responses.cancel(background.id)).status, "cancelled");
});

check("responses: background", async () => {
  let response = await respond(SAID.count, { background: true });
  while (["queued", "in_progress"].includes(response.status)) {
    await new Promise((resolve) => setTimeout(resolve, 50));
    response = await client.responses.retrieve(response.id);
  }
  equal(response.output_text, SAID.counted);
  const events = await eventsOf(response.id, {});
  equal(await eventsOf(response.id, { starting_after: 3 }), events.slice(4));
});

async function eventsOf(id, fields) {
  const events = [];
  for await (const event of await client.responses.retrieve(id, { stream: true, ...fields })) events.push(event);
  return events;
}

check("responses: conversation", async () => {
  const first = await respond("My name is Ada.");
  const second = await respond(SAID.count, { previous_response_id: first.id });
  const third = await respond("What is my name?", { previous_response_id: second.id });
  equal(third.output_text.includes("Ada"), true);
  let items = 0;
  for await (const _ of client.responses.inputItems.list(third.id, { limit: 2 })) items += 1;
  equal(items, 5);
});

check("responses: delete", async () => {
  const response = await respond();
  await client.responses.delete(response.id);
  await refusedWith(404, statusOf, () => client.responses.retrieve(response.id));
});

check("models: list", async () => {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  equal([found.includes(SAID.model), (await client.models.retrieve(SAID.model)).id], [true, SAID.model]);
});

const uploaded = async (content = batchLines()) =>
  client.files.create({ file: await toFile(Buffer.from(content), "in.jsonl"), purpose: "batch" });
const started = async (content, fields = {}) =>
  client.batches.create({
    input_file_id: (await uploaded(content)).id,
    endpoint: "/v1/chat/completions",
    completion_window: "24h",
    ...fields,
  });
const toEnd = ({ id }) => untilEnded(() => client.batches.retrieve(id));
const linesOf = async (id) =>
  (await (await client.files.content(id)).text()).trimEnd().split("\n").map((line) => JSON.parse(line));

check("files: upload, retrieve, content, delete", async () => {
  const content = batchLines();
  const file = await uploaded(content);
  equal([file.filename, file.bytes, file.purpose], ["in.jsonl", content.length, "batch"]);
  equal((await client.files.retrieve(file.id)).id, file.id);
  equal(await (await client.files.content(file.id)).text(), content);
  equal((await client.files.delete(file.id)).deleted, true);
  await refusedWith(404, statusOf, () => client.files.retrieve(file.id));
});

check("files: list", async () => {
  const ids = [];
  for (let i = 0; i < 3; i += 1) ids.unshift((await uploaded()).id);
  const found = [];
  for await (const file of client.files.list({ purpose: "batch", limit: 2 })) found.push(file.id);
  equal(found.filter((id) => ids.includes(id)), ids);
});

check("uploads: parts, cancel", async () => {
  const content = batchLines();
  const about = { filename: "in.jsonl", bytes: content.length, mime_type: "text/jsonl", purpose: "batch" };
  const { id } = await client.uploads.create(about);
  const add = async (text) => (await client.uploads.parts.create(id, { data: await toFile(Buffer.from(text), "x") })).id;
  const [last, first] = [await add(content.slice(9)), await add(content.slice(0, 9))];
  const done = await client.uploads.complete(id, { part_ids: [first, last] });
  equal([done.status, await (await client.files.content(done.file.id)).text()], ["completed", content]);
  equal((await client.uploads.cancel((await client.uploads.create(about)).id)).status, "cancelled");
});

check("batches: run", async () => {
  const batch = await toEnd(await started(undefined, { metadata: { a: "b" } }));
  const { total, completed, failed } = batch.request_counts;
  equal([batch.status, batch.metadata, total, completed, failed], ["completed", { a: "b" }, 3, 2, 1]);
  const answers = await linesOf(batch.output_file_id);
  equal(answers.map((line) => line.custom_id).sort(), ["line-0", "line-1"]);
  for (const line of answers) equal(line.response.body.choices[0].message.content, SAID.counted);
  equal((await linesOf(batch.error_file_id)).map((line) => line.custom_id), ["bad"]);
});

check("batches: list", async () => {
  const ids = [];
  for (let i = 0; i < 3; i += 1) ids.unshift((await started()).id);
  const found = [];
  for await (const batch of client.batches.list({ limit: 2 })) found.push(batch.id);
  equal([new Set(found).size, ids.every((id) => found.includes(id))], [found.length, true]);
});

check("batches: cancel", async () => {
  const batch = await started(batchLines(200, { logit_bias: SAID.unending, max_tokens: SAID.limit }));
  equal(["cancelling", "cancelled"].includes((await client.batches.cancel(batch.id)).status), true);
  equal((await toEnd(batch)).status, "cancelled");
});

check("batches: errors", async () => {
  const batch = await toEnd(await started(`${batchLines()}{}\n`));
  equal([batch.status, batch.errors.data[0].line], ["failed", 4]);
  await refusedWith(404, statusOf, () => client.batches.retrieve("batch_absent"));
});

check("webhooks: unwrap", async () => {
  const batch = await started();
  const event = await received(async (body, headers) => {
    const found = await client.webhooks.unwrap(body, headers, HOOK_SECRET);
    return found.data.id === batch.id && found;
  });
  equal([event.type, event.object], ["batch.completed", "event"]);
});

await runChecks("openai");
