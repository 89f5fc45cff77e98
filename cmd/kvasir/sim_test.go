package main

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestSim(t *testing.T) {
	folder := t.TempDir()
	status, out, errs := kvasir(t, "", "sim", "balance", "--every", "20", "--svg", folder, "crash-token-band")
	if status != exitOK || errs != "" {
		t.Fatalf("status %d: %s", status, errs)
	}
	for _, want := range []string{"balance: nothing happens", "lives", "death spiral"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	for _, name := range []string{"balance", "crash-token-band"} {
		f, err := os.Open(filepath.Join(folder, name+".svg"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		lines := 0
		for d := xml.NewDecoder(f); ; {
			token, err := d.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if e, ok := token.(xml.StartElement); ok && e.Name.Local == "polyline" {
				lines++
			}
		}
		if lines < 6 {
			t.Errorf("%s has %d curves", name, lines)
		}
	}
	if _, out, _ := kvasir(t, "", "sim", "--list"); !strings.Contains(out, "mercenaries-pot") || strings.Contains(out, "lives") {
		t.Errorf("the list is\n%s", out)
	}
	for _, args := range [][]string{{"sim", "nothing"}, {"sim", "--every", "-1"}} {
		if status, _, errs := kvasir(t, "", args...); status != exitUsage {
			t.Errorf("%v: status %d, %s", args, status, errs)
		}
	}
	if status, _, errs := kvasir(t, "", "sim", "balance", "--svg", filepath.Join(folder, "none")); status != exitFail || !strings.Contains(errs, "none") {
		t.Errorf("a folder that is not there: status %d, %s", status, errs)
	}
}
