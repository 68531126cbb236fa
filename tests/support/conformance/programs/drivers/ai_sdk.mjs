// One turn of an agent made with the AI SDK: ai_sdk.mjs chat|responses|messages begin|"go on" IMAGE MESSAGE
import { exec } from "node:child_process";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { promisify } from "node:util";
import { stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as models from "./sluice.mjs";

const [api, how, image, text] = process.argv.slice(2);
const kept = "history.json";
const history = how === "go on" && existsSync(kept) ? JSON.parse(readFileSync(kept, "utf8")) : [];
const picture = image ? [{ type: "image", image: readFileSync(image).toString("base64"), mediaType: "image/png" }] : [];
const messages = [...history, { role: "user", content: [{ type: "text", text }, ...picture] }];
const shell = tool({
  description: "Run a line of shell",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => (await promisify(exec)(command)).stdout,
});

const errors = [];
const answer = streamText({
  model: models[api],
  system: "You run shell commands.",
  messages,
  tools: { shell },
  stopWhen: stepCountIs(8),
  onError: ({ error }) => errors.push(error),
});
for await (const piece of answer.textStream) process.stdout.write(piece);
if (errors.length) {
  console.error(String(errors[0]?.message ?? errors[0]));
  process.exit(1);
}
writeFileSync(kept, JSON.stringify([...messages, ...(await answer.responseMessages)]));
