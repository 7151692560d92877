// The manual is served under the dashboard's content security policy, which wants trusted types and
// forbids forms. Sphinx' search shows results made of the built pages, with what was typed escaped.
if (window.trustedTypes) {
  window.trustedTypes.createPolicy("default", { createHTML: (text) => text });
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  if (form.method === "get") {
    event.preventDefault();
    location.href = `${form.action}?${new URLSearchParams(new FormData(form))}`;
  }
});
