// Shared by all pages of a browser: however many there are, the server has one stream of theirs.
import { LiveStream } from "./live_stream.js";

const SILENT_MS = 100_000;
const pages = new Map(); // Each page's port, with whether it is seen, and when it was heard last.
const stream = new LiveStream((told) => {
  for (const port of pages.keys()) port.postMessage(told);
});

function look() {
  const oldest = Date.now() - SILENT_MS;
  for (const [port, page] of pages) if (page.heard < oldest) pages.delete(port);
  stream.want([...pages.values()].some((page) => page.seen));
}

self.onconnect = (event) => {
  const [port] = event.ports;
  port.onmessage = ({ data }) => {
    pages.set(port, { seen: data.seen, heard: Date.now() });
    if (data.again) stream.begin();
    look();
  };
  port.start();
};
setInterval(look, SILENT_MS / 2);
