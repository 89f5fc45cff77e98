//go:build !linux

package node

import "time"

func sleepUntil(due time.Time) { time.Sleep(time.Until(due)) }
