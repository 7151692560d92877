/** Saves something the page has as a file. */

export function save(name: string, content: Blob | string): void {
  const blob = typeof content === "string" ? new Blob([content], { type: "text/csv" }) : content;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  // After the browser has taken it.
  window.setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
