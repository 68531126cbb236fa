// The page: a conversation, which the tab keeps over a reload.

import { Answer } from "./answer.js";
import { models, Refused, storedKey, storeKey } from "./stream.js";

const STORE = "sluice.chat";
const MAX_IMAGE_PX = 1024;
const $ = (selector) => document.querySelector(selector);
const main = $("main"), turns = $("#turns"), box = $("#box"), send = $("#send"), model = $("#model");

let chat = read(); // {model, turns: [{user, images, answer}]}
let running = null; // the answer under way
let images = []; // data URLs that the next message takes along
let saving;

function read() {
  try { return JSON.parse(sessionStorage.getItem(STORE)) ?? { turns: [] }; } catch { return { turns: [] }; }
}

function save() {
  clearTimeout(saving);
  saving = undefined;
  try { sessionStorage.setItem(STORE, JSON.stringify(chat)); } catch { /* too many images for the tab's storage */ }
}
const saveSoon = () => { saving ??= setTimeout(save, 200); };
addEventListener("pagehide", save);

const notice = (text = "") => { $("#notice").textContent = text; };

function content(turn) {
  if (!turn.images?.length) return turn.user;
  return [...turn.images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: turn.user }];
}

/** Returns the request for the last turn: those before it that were answered, and the turn itself. */
function request() {
  const earlier = chat.turns.slice(0, -1).filter((turn) => turn.answer.text && !turn.answer.failed);
  const last = chat.turns.at(-1);
  const messages = earlier.flatMap((turn) => [
    { role: "user", content: content(turn) }, { role: "assistant", content: turn.answer.text },
  ]);
  return { model: last.model, messages: [...messages, { role: "user", content: content(last) }] };
}

function picture(url) {
  const made = document.createElement("img");
  made.src = url;
  made.alt = "image";
  return made;
}

function show(turn) {
  const user = document.createElement("div");
  user.className = "user";
  user.dir = "auto";
  user.append(...(turn.images ?? []).map(picture), turn.user);
  turns.append(user);
  return new Answer(turns, turn.answer, saveSoon, () => begin("Continue where you stopped."));
}

async function run(answer) {
  setRunning(answer);
  main.scrollTop = main.scrollHeight;
  try {
    while (!answer.state.done) {
      try {
        await answer.run(request());
      } catch (error) {
        if (!(error instanceof Refused && error.status === 401)) throw error;
        await login("The gateway does not accept this key.");
      }
    }
  } finally {
    save();
    if (running === answer) setRunning(null);
  }
}

function setRunning(answer) {
  running = answer;
  send.textContent = answer ? "Stop" : "Send";
  send.classList.toggle("stop", Boolean(answer));
}

function ask() {
  const user = box.value.trim();
  if ((!user && !images.length) || running) return;
  const sent = images;
  box.value = "";
  images = [];
  showImages();
  begin(user, sent);
}

/** Adds a turn to the conversation, and runs it. */
function begin(user, sent = []) {
  if (running) return;
  const turn = { user, images: sent, model: model.value || undefined, answer: Answer.fresh() };
  chat.turns.push(turn);
  notice();
  save();
  run(show(turn));
}

function startAnew() {
  running?.stop();
  setRunning(null);
  chat = { model: chat.model, turns: [] };
  save();
  turns.replaceChildren();
  box.focus();
}

let entering = null; // the key that the dialog is asking for

/** Asks for a key, and returns when one was given. */
function login(text) {
  if (storedKey()) $("#login-text").textContent = text;
  entering ??= new Promise((resolve) => {
    $("#login").showModal();
    $("#login").oncancel = (event) => event.preventDefault(); // there is nothing to do without a key
    $("#login-form").onsubmit = (event) => {
      event.preventDefault();
      storeKey($("#key").value.trim());
      $("#key").value = "";
      $("#login").close();
      entering = null;
      resolve();
    };
  });
  return entering;
}

let abilities = new Map();

async function loadModels() {
  for (;;) {
    try {
      const found = (await models()).filter(({ sluice }) => !sluice?.embeddings);
      abilities = new Map(found.map(({ id, sluice }) => [id, sluice ?? {}]));
      model.replaceChildren(...found.map(({ id, sluice }) => new Option(option(id, sluice), id)));
      if (abilities.has(chat.model)) model.value = chat.model;
      model.hidden = !found.length;
      notice(found.length ? "" : "No worker is running. Start one: sluice worker --model FOLDER_OR_HUB_ID");
      return showAbilities();
    } catch (error) {
      if (error instanceof Refused && error.status === 401) await login("The gateway does not accept this key.");
      else return notice(error instanceof Refused ? error.message : "The gateway does not answer. Reload in a moment.");
    }
  }
}

// A model that is not loaded is loaded for its first message.
function option(id, sluice) {
  return (sluice?.state ?? "loaded") === "loaded" ? id : `${id} (${sluice.state})`;
}

function showAbilities() {
  $("#attach").hidden = !abilities.get(model.value)?.images;
}

async function shrunk(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_IMAGE_PX / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

async function attach(files) {
  const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
  if (!pictures.length) return;
  notice($("#attach").hidden ? "This model takes no images." : "");
  if ($("#attach").hidden) return;
  for (const file of pictures) {
    try { images.push(await shrunk(file)); } catch { notice(`${file.name}: this is not an image that the browser can read.`); }
  }
  showImages();
}

function showImages() {
  $("#images").replaceChildren(...images.map((url, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "Remove this image";
    button.setAttribute("aria-label", button.title);
    button.append(picture(url));
    button.onclick = () => { images.splice(index, 1); showImages(); };
    return button;
  }));
}

$("#ask").onsubmit = (event) => { event.preventDefault(); running ? running.stop() : ask(); };
$("#new").onclick = startAnew;
$("#attach").onclick = () => $("#file").click();
$("#file").onchange = (event) => { attach(event.target.files); event.target.value = ""; };
box.onpaste = (event) => attach(event.clipboardData.files);
document.ondragover = (event) => event.preventDefault();
document.ondrop = (event) => { event.preventDefault(); attach(event.dataTransfer.files); };
model.onchange = () => { chat.model = model.value; save(); showAbilities(); };
box.onkeydown = (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  ask();
};
document.onkeydown = (event) => { if (event.key === "Escape") running?.stop(); };

const shown = chat.turns.map(show);
loadModels();
if (shown.length && !shown.at(-1).state.done) {
  shown.at(-1).state.resumed = true;
  run(shown.at(-1));
} else main.scrollTop = main.scrollHeight;
