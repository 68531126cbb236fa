// What the checks in JavaScript share: one line for each, which tests.support.conformance.results reads.
import { readFileSync } from "node:fs";
import { createServer } from "node:http";

export const URL_OF_GATEWAY = process.env.SLUICE_CONFORMANCE_URL;
export const BASE_URL = `${URL_OF_GATEWAY}/v1`;
export const [HOOK_PORT, HOOK_SECRET] = (process.env.SLUICE_CONFORMANCE_HOOK ?? "0 none").split(" ");
export const SAID = JSON.parse(readFileSync(new URL("requests.json", import.meta.url)));
export const IMAGE_URL = `data:image/png;base64,${SAID.image}`;
export const IMAGE_PARTS = [
  { type: "text", text: SAID.question },
  { type: "image_url", image_url: { url: IMAGE_URL } },
];
export const TOOL = { type: "function", function: SAID.weather };
const CANCELLED = 499;
const BATCH_MS = 60_000; // for a run of few lines
const CANCEL_MS = 10_000; // far less than the unending answer takes to its limit

const checks = [];

export function check(call, run) {
  checks.push([call, run]);
}

export async function runChecks(name) {
  const installed = new URL(`node_modules/${name}/package.json`, import.meta.url);
  write("version", JSON.parse(readFileSync(installed)).version);
  for (const [call, run] of checks) {
    try {
      await run();
      write("pass", call);
    } catch (error) {
      write("fail", call, `${error}`.slice(0, 300));
    }
  }
  process.exit(0);
}

function write(...parts) {
  console.log(parts.map((part) => part.replace(/\s+/g, " ")).join("\t"));
}

export function equal(found, expected) {
  const [one, other] = [JSON.stringify(found), JSON.stringify(expected)];
  if (one !== other) throw new Error(`${one} is not ${other}`);
}

// Return the error that the call raises, which must have this HTTP status.
export async function refusedWith(status, statusOf, call) {
  let refused;
  try {
    await call();
  } catch (error) {
    refused = error;
  }
  if (!refused) throw new Error("no error was raised");
  equal(statusOf(refused), status);
  return refused;
}

// Wait until the job has ended; it must have been cancelled, and soon.
export async function awaitCancelled(jobId) {
  const began = Date.now();
  const answer = await fetch(`${BASE_URL}/chat/completions/${jobId}`);
  equal(answer.status, CANCELLED);
  if (Date.now() - began > CANCEL_MS) throw new Error("the job was cancelled late");
}

// Throw unless an image made a prompt of `withImage` tokens out of one of `without`.
export function tookTokens(withImage, without) {
  if (!(withImage > without && without > 0)) {
    throw new Error(`a prompt with an image has ${withImage} tokens, and ${without} without`);
  }
}

// A file of lines that are answered, and a last one that fails.
export function batchLines(count = 2, fields = {}) {
  const body = { model: SAID.model, messages: user(), temperature: 0, ...fields };
  const bodies = [...Array(count).keys()].map((number) => [`line-${number}`, body]);
  bodies.push(["bad", { ...body, temperature: 9 }]);
  const lines = bodies.map(([id, body]) => ({ custom_id: id, method: "POST", url: "/v1/chat/completions", body }));
  return lines.map((line) => `${JSON.stringify(line)}\n`).join("");
}

// Return the state of a run when it has ended.
export async function untilEnded(retrieve) {
  const began = Date.now();
  while (Date.now() - began < BATCH_MS) {
    const batch = await retrieve();
    if (["completed", "failed", "expired", "cancelled"].includes(batch.status)) return batch;
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
  throw new Error("the run did not end");
}

// Receive webhooks until one of them is accepted: `accepts` gets its body and its headers.
export async function received(accepts) {
  let server;
  try {
    return await new Promise((resolve, reject) => {
      server = createServer(async (request, reply) => {
        let body = "";
        for await (const part of request) body += part;
        reply.writeHead(204).end();
        accepts(body, request.headers).then((event) => event && resolve(event), reject);
      }).listen(Number(HOOK_PORT), "127.0.0.1");
      setTimeout(() => reject(new Error("no webhook came")), BATCH_MS);
    });
  } finally {
    server.close();
  }
}

export function user(content = SAID.count) {
  return [{ role: "user", content }];
}
