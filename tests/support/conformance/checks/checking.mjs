// What the checks in JavaScript share: one line for each, which tests.support.conformance.results reads.
import { readFileSync } from "node:fs";

export const URL_OF_GATEWAY = process.env.SLUICE_CONFORMANCE_URL;
export const BASE_URL = `${URL_OF_GATEWAY}/v1`;
export const SAID = JSON.parse(readFileSync(new URL("requests.json", import.meta.url)));
export const IMAGE_URL = `data:image/png;base64,${SAID.image}`;
export const IMAGE_PARTS = [
  { type: "text", text: SAID.question },
  { type: "image_url", image_url: { url: IMAGE_URL } },
];
export const TOOL = { type: "function", function: SAID.weather };
const CANCELLED = 499;
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

export function user(content = SAID.count) {
  return [{ role: "user", content }];
}
