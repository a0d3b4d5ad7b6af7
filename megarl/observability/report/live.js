// A live report: loads itself again where there is news, and leaves open what is open.
const state = document.querySelector("footer").textContent;
const parts = [...document.querySelectorAll("details")];
JSON.parse(sessionStorage.open ?? "[]").forEach((open, i) => { if (parts[i]) parts[i].open = open; });
setInterval(async () => {
  const now = await fetch("state").then(answer => answer.text()).catch(() => state);
  if (now === state) return;
  sessionStorage.open = JSON.stringify(parts.map(part => part.open));
  location.reload();  // the browser scrolls to where the reader was
}, 2000);
