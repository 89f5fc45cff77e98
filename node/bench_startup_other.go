//go:build !linux

package node

import "errors"

// forgetPages has the page cache forget a file.
func forgetPages(string) error {
	return errors.New("the page cache is asked to forget a file on Linux only")
}
