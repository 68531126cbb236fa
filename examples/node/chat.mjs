// node examples/node/chat.mjs chat TEXT          submit and print the answer
//                             submit JSON        submit a request and print the job's id
//                             events ID [AFTER]  print the events after a seq, one JSON object per line
//                             result ID
//                             cancel ID
// The server is SLUICE_REDIS_URL, or redis://localhost:6379/0.

import { Sluice } from "./sluice.mjs";

const sluice = new Sluice(process.env.SLUICE_REDIS_URL ?? "redis://localhost:6379/0");

async function chat(text) {
  const id = await sluice.submit({ messages: [{ role: "user", content: text }] });
  for await (const event of sluice.stream(id)) {
    if (event.type === "delta") process.stdout.write(event.content ?? "");
    if (event.type === "finished") process.stdout.write("\n");
    if (event.type === "restarted") process.stdout.write("\n[starts over]\n");
    if (event.type === "failed") throw new Error(`${event.error.type}: ${event.error.message}`);
    if (event.type === "cancelled") throw new Error(`cancelled: ${event.reason}`);
  }
}

async function events(id, after = "-1") {
  for await (const event of sluice.stream(id, Number(after))) console.log(JSON.stringify(event));
}

const commands = {
  chat,
  events,
  submit: async (json) => console.log(await sluice.submit(JSON.parse(json))),
  result: async (id) => console.log(JSON.stringify(await sluice.result(id))),
  cancel: (id) => sluice.cancel(id),
};

const usage = "usage: chat TEXT | submit JSON | events ID [AFTER] | result ID | cancel ID";
const [name, ...words] = process.argv.slice(2);
try {
  if (!(name in commands) || words.length === 0) throw new Error(usage);
  await commands[name](...words);
} catch (error) {
  console.error(`chat.mjs: ${error.message}`);
  process.exitCode = 1;
} finally {
  await sluice.close();
}
