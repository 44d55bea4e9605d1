// Follow a run that goes on: ask the server for new data, and say how old the page is.

const POLL_MSEC = 1000;
const live = { etag: null, at: 0, isReached: true };

function startLive() {
  live.at = Date.now();
  sayAge();
  if (!page.data.live) return;
  setInterval(sayAge, 1000);
  poll();
}

/** Ask once, then again a second after the answer. */
async function poll() {
  try {
    const answer = await fetch("data.json", {
      cache: "no-store",
      headers: live.etag ? { "If-None-Match": live.etag } : {},
      signal: AbortSignal.timeout(10_000),
    });
    if (answer.ok) {
      const data = await answer.json();
      live.etag = answer.headers.get("ETag");
      live.at = Date.now();
      reached(true);
      takeData(data);
    } else if (answer.status === 304) {
      live.at = Date.now();
      reached(true);
    } else reached(false);
  } catch (error) {
    if (!(
      error instanceof TypeError ||
      error.name === "TimeoutError" ||
      error instanceof SyntaxError
    )) {
      setTimeout(poll, POLL_MSEC);
      throw error;
    }
    reached(false);
  }
  sayAge();
  setTimeout(poll, POLL_MSEC);
}

/** Say aloud when the server goes or comes back, and nothing while it stays. */
function reached(isReached) {
  if (isReached === live.isReached) return;
  live.isReached = isReached;
  document.body.classList.toggle("lost", !isReached);
  announce(
    isReached
      ? "The server is reached again."
      : "The server is not reached; trying again each second.",
  );
}

function announce(text) {
  setText(document.getElementById("said"), text);
}

function sayAge() {
  const place = document.getElementById("age");
  if (!page.data.live) {
    setText(place, `made ${clock(page.data.made_at)}`);
    return;
  }
  const sec = Math.max(0, Math.round((Date.now() - live.at) / 1000));
  setText(
    place,
    live.isReached
      ? `updated ${sec} s ago`
      : `not reached; last update ${duration(sec)} ago`,
  );
}
