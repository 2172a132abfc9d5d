import { useEffect, useRef } from "preact/hooks";

interface Props {
  option: Record<string, unknown>;
  height: number;
  label: string;
}

/** A chart; its code is loaded when the first one is shown. */
export function Chart({ option, height, label }: Props) {
  const place = useRef<HTMLDivElement>(null);
  const latest = useRef(option);
  const drawn = useRef<{ update: () => void; end: () => void }>();
  latest.current = option;
  useEffect(() => {
    let gone = false;
    import("./charts").then(({ draw }) => {
      if (!gone && place.current) drawn.current = draw(place.current, () => latest.current);
    });
    return () => {
      gone = true;
      drawn.current?.end();
    };
  }, []);
  useEffect(() => drawn.current?.update(), [option]);
  return <div ref={place} class="chart" role="img" aria-label={label} style={{ height: `${height}px` }} />;
}
