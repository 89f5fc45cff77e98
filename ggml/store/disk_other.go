//go:build !linux

package store

import (
	"errors"
	"os"
)

func cloneFile(string, string) error { return errors.ErrUnsupported }

func punchHole(*os.File, Span) (bool, error) { return false, nil }
