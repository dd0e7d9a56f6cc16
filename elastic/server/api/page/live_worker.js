// Shared by all pages of a browser: however many there are, the server has one stream of theirs.
import { LiveStream } from "./live_stream.js";

const SILENT_MS = 100_000;
const FOLLOWING_MAX = 3; // A browser has six connections to a server: one is this worker's, and others are for what pages ask.
const pages = new Map(); // Each page's port, with whether it is seen, whether it asks for a stream and was granted it, and when it was heard last.
const stream = new LiveStream((told) => {
  for (const port of pages.keys()) port.postMessage(told);
});

function look() {
  const oldest = Date.now() - SILENT_MS;
  for (const [port, page] of pages) if (page.heard < oldest) pages.delete(port);
  stream.want([...pages.values()].some((page) => page.seen));
  const asking = [...pages].filter(([, page]) => page.seen && page.follows);
  asking.sort(([, one], [, other]) => Number(other.granted === true) - Number(one.granted === true)); // Who has one keeps it.
  asking.forEach(([port, page], place) => {
    const granted = place < FOLLOWING_MAX;
    if (granted !== page.granted) port.postMessage({ kind: "follow", granted });
    page.granted = granted;
  });
  for (const page of pages.values()) if (!page.seen || !page.follows) page.granted = null; // Who comes to be seen hears it in any case.
}

self.onconnect = (event) => {
  const [port] = event.ports;
  port.onmessage = ({ data }) => {
    pages.set(port, { ...pages.get(port), seen: data.seen, follows: data.follows, heard: Date.now() });
    if (data.again) stream.begin();
    look();
  };
  port.start();
};
setInterval(look, SILENT_MS / 2);
