// A chat from a terminal, as an example of Sluice's contract in Go. In this folder:
//
//	go run . chat TEXT          submit and print the answer
//	go run . submit JSON        submit a request and print the job's id
//	go run . events ID [AFTER]  print the events after a seq, one JSON object per line
//	go run . result ID
//	go run . cancel ID
//
// The server is SLUICE_REDIS_URL, or redis://localhost:6379/0.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
)

func main() {
	address := os.Getenv("SLUICE_REDIS_URL")
	if address == "" {
		address = "redis://localhost:6379/0"
	}
	if err := run(address, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sluice-example:", err)
		os.Exit(1)
	}
}

func run(address string, words []string) error {
	if len(words) < 2 {
		return errors.New("usage: chat TEXT | submit JSON | events ID [AFTER] | result ID | cancel ID")
	}
	redis, err := open(address)
	if err != nil {
		return err
	}
	defer redis.Close()
	switch name, word := words[0], words[1]; name {
	case "chat":
		return chat(redis, address, word)
	case "submit":
		id, err := Submit(redis, json.RawMessage(word), "default", "interactive")
		return printed(id, err)
	case "events":
		return events(address, word, words[2:])
	case "result":
		stored, err := Result(redis, word)
		return printed(stored, err)
	case "cancel":
		return Cancel(redis, word)
	default:
		return fmt.Errorf("%s: unknown command", name)
	}
}

func chat(redis *connection, address, text string) error {
	messages := []map[string]string{{"role": "user", "content": text}}
	request, err := json.Marshal(map[string]any{"messages": messages})
	if err != nil {
		return err
	}
	id, err := Submit(redis, request, "default", "interactive")
	if err != nil {
		return err
	}
	return Stream(address, id, -1, func(event Event) error {
		switch event.Type {
		case "delta":
			fmt.Print(event.Content)
		case "finished":
			fmt.Println()
		case "restarted":
			fmt.Print("\n[starts over]\n")
		case "failed":
			return fmt.Errorf("%s: %s", event.Error.Type, event.Error.Message)
		case "cancelled":
			return fmt.Errorf("cancelled: %s", event.Reason)
		}
		return nil
	})
}

func events(address, id string, words []string) error {
	after := -1
	if len(words) > 0 {
		number, err := strconv.Atoi(words[0])
		if err != nil {
			return err
		}
		after = number
	}
	return Stream(address, id, after, func(event Event) error {
		_, err := fmt.Println(event.JSON)
		return err
	})
}

func printed(text string, err error) error {
	if err == nil {
		fmt.Println(text)
	}
	return err
}
