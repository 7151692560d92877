/** Error boundary: a failed view shows its error, the others keep working. */

import { Component, type ReactNode } from "react";

import { Trouble } from "./bits";

export class Boundary extends Component<{ children: ReactNode }, { problem: string }> {
  override state = { problem: "" };

  static getDerivedStateFromError(error: unknown): { problem: string } {
    return { problem: error instanceof Error ? error.message : String(error) };
  }

  override render(): ReactNode {
    if (!this.state.problem) return this.props.children;
    return <Trouble>This view failed: {this.state.problem}. Reload the page.</Trouble>;
  }
}
